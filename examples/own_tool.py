"""A tool of your own: any function with types and a docstring that returns a text."""

import harness1 as h

PRICES = {"ACME": "12.30", "HOOLI": "7.05"}


@h.tool
def lookup_price(ticker: str) -> str:
    """Return the last closing price of a stock."""
    if ticker not in PRICES:
        raise h.ToolError(f"there is no stock {ticker}")  # the policy reads it, and goes on
    return PRICES[ticker]


if __name__ == "__main__":
    env = h.Env(tools=[*h.TOOLS, lookup_price])
    run = h.evaluate(env, h.load("world:200"), policy="random", limit=5)
    calls = [turn for episode in run.episodes for turn in episode.turns if turn.observation.tool == "lookup_price"]
    print(f"{len(calls)} calls of lookup_price in {len(run.episodes)} episodes, recorded in {run.folder}")
