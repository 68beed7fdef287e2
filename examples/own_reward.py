"""A reward of your own: any function of a finished episode and its gold that returns a number."""

import harness1 as h


def brevity(case: h.Case) -> float:
    """Return 0 for an empty delivery, -1 for a full one."""
    return -len(case.curated) / 30


if __name__ == "__main__":
    env = h.Env(reward=[h.reward.recall, (brevity, 0.2)])
    run = h.evaluate(env, h.load("world:200"), policy="scripted", limit=5)
    print(f"reward {run.metrics['reward']['mean']:.2f}, recorded in {run.folder}")
