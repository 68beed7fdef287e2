"""The reward of search_agent.py: F1 of the documents that it delivered, against those that the task needs."""

from harness1.agents.evaluation import AgentSession


def f1(session: AgentSession) -> float:
    delivered = set(session.read("delivered.txt").splitlines())
    needed = {name for name, grade in session.task.gold.relevant.items() if grade > 0} if session.task.gold else set()
    right = len(delivered & needed)
    return 2 * right / (len(delivered) + len(needed)) if right else 0.0
