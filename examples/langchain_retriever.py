"""Search by a retriever of LangChain: `python examples/langchain_retriever.py INDEX "QUESTION"`."""
# pip install "harness1[langchain]"

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from harness1 import Config, Task, rollout
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup
from harness1.errors import InfrastructureFault


class SearchRetriever(BaseRetriever):
    index: str
    policy: str = "scripted"
    config: Config = Config()

    async def _aget_relevant_documents(self, query: str, *, run_manager: object) -> list[Document]:
        setup, task = EpisodeSetup(self.config, self.index, self.policy), Task("query", query)
        policy = setup.policy_for([EpisodeJob(task)])
        env = setup.environment(setup.open_retriever(), policy)
        episode = await rollout(env, policy, task)
        if episode.error:
            raise InfrastructureFault(episode.error)
        text, pool = env.state.memory.text_of, env.state.memory.pool.entries
        found = [pool[each.unit_id] for each in episode.curated]
        return [Document(text(each.unit_id), id=each.unit_id, metadata={"title": each.title}) for each in found]

    def _get_relevant_documents(self, query: str, *, run_manager: object) -> list[Document]:
        with ThreadPoolExecutor(1) as thread:  # a notebook calls this on its event loop
            return thread.submit(asyncio.run, self._aget_relevant_documents(query, run_manager=run_manager)).result()


if len(sys.argv) != 3:
    print('usage: python examples/langchain_retriever.py INDEX "QUESTION"', file=sys.stderr)
    sys.exit(2)
print(*SearchRetriever(index=sys.argv[1]).invoke(sys.argv[2]), sep="\n\n")
