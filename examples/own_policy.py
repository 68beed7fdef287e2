"""A policy of your own: a class with a method that sees the context and returns a call of a tool."""

import harness1 as h


class FirstHits:
    """Searches the question once, and delivers the first three documents."""

    def act(self, context: h.Context) -> h.ToolCall:
        view = context.view
        if context.turn == 1:
            return h.ToolCall("search_corpus", {"query": view.query})
        if context.turn == 2:
            return h.ToolCall("curate", {"add_ids": list(view.documents)[:3], "remove_ids": list(view.documents)[3:]})
        return h.ToolCall("end_search", {"reasoning": "These are the first hits."})


if __name__ == "__main__":
    run = h.evaluate(h.Env(), h.load("world:200"), policy=FirstHits(), limit=5)
    print(f"precision {run.metrics['curated_precision']['mean']:.2f}, recorded in {run.folder}")
