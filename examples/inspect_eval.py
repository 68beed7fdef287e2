"""Evaluate a model by Inspect.

pip install "harness1[inspect]"
python examples/inspect_eval.py MODEL DATASET INDEX [LIMIT]     # openai/gpt-5-mini hotpotqa hotpotqa.index 20
"""

import sys

from inspect_ai import eval as evaluate

from harness1.adapters.inspect_task import search

if len(sys.argv) not in (4, 5):
    print("usage: python examples/inspect_eval.py MODEL DATASET INDEX [LIMIT]", file=sys.stderr)
    sys.exit(2)
model, data, index, limit = [*sys.argv[1:], "3"][:4]
(log,) = evaluate(search(data, index, limit=int(limit)), model=model, display="none", log_dir="runs/inspect")
if log.results is None:
    sys.exit(log.error.message if log.error else f"the evaluation is {log.status}")
for score in log.results.scores:
    print(score.name, *(f"{name} {metric.value:.3f}" for name, metric in score.metrics.items()))
