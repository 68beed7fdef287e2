"""A client of `harness1 serve openenv --data DATASET --index INDEX`.

pip install "harness1[openenv]"
python examples/openenv_client.py ADDRESS
"""

import asyncio
import sys

from openenv.core.generic_client import GenericEnvClient


async def main(address: str) -> None:
    client = GenericEnvClient(base_url=address)
    await client.connect()
    result = await client.reset(split="test", index=0)
    prompt = "".join(str(message["content"]) for message in result.observation["messages"])
    question = prompt.partition("Question: ")[2].partition("\n")[0]
    await client.step({"tool": "search_corpus", "arguments": {"query": question}})
    result = await client.step({"tool": "end_search", "arguments": {"reasoning": "one search is enough"}})
    print(question, [each["id"] for each in result.observation["curated"]], round(result.reward, 3), sep="\n")
    await client.close()


if len(sys.argv) != 2:
    print("usage: python examples/openenv_client.py ADDRESS", file=sys.stderr)
    sys.exit(2)
asyncio.run(main(sys.argv[1]))
