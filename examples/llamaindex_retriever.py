"""Search by a retriever of LlamaIndex: `python examples/llamaindex_retriever.py INDEX "QUESTION"`."""
# pip install "harness1[llamaindex]"

import sys

from llama_index.core.async_utils import asyncio_run
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from harness1 import Config, Task, rollout
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup
from harness1.errors import InfrastructureFault


class SearchRetriever(BaseRetriever):
    def __init__(self, index: str, policy: str = "scripted", config: Config | None = None) -> None:
        super().__init__()
        self.setup = EpisodeSetup(config or Config(), index, policy)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        task = Task("query", query_bundle.query_str)
        policy = self.setup.policy_for([EpisodeJob(task)])
        env = self.setup.environment(self.setup.open_retriever(), policy)
        episode = await rollout(env, policy, task)
        if episode.error:
            raise InfrastructureFault(episode.error)
        text, pool = env.state.memory.text_of, env.state.memory.pool.entries
        found = [pool[each.unit_id] for each in episode.curated]
        nodes = [TextNode(id_=each.unit_id, text=text(each.unit_id), metadata={"title": each.title}) for each in found]
        return [NodeWithScore(node=node, score=1 / rank) for rank, node in enumerate(nodes, 1)]

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return asyncio_run(self._aretrieve(query_bundle))


if len(sys.argv) != 3:
    print('usage: python examples/llamaindex_retriever.py INDEX "QUESTION"', file=sys.stderr)
    sys.exit(2)
print(*SearchRetriever(sys.argv[1]).retrieve(sys.argv[2]), sep="\n\n")
