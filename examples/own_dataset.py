"""Documents and questions of your own: a dataset to evaluate on, in 15 lines."""

import harness1 as h

DATA = h.Dataset(
    documents=[
        {"id": "ada", "title": "Ada Lovelace", "text": "Ada Lovelace wrote a program for the Analytical Engine."},
        {
            "id": "engine",
            "title": "Analytical Engine",
            "text": "Charles Babbage designed the Analytical Engine in 1837.",
        },
        {"id": "loom", "title": "Jacquard loom", "text": "The Jacquard loom read its patterns from punched cards."},
    ],
    tasks=[
        {"question": "Who designed the machine that Ada Lovelace wrote for?", "relevant": ["ada", "engine"]},
        {"question": "What did the Jacquard loom read?", "relevant": ["loom"], "answers": ["punched cards"]},
    ],
)

if __name__ == "__main__":
    run = h.evaluate(h.Env(), DATA, policy="scripted")
    print(f"recall {run.metrics['curated_recall']['mean']:.2f}, recorded in {run.folder}")
