"""An agent without a model, over the Model Context Protocol.

pip install "harness1[mcp]"
python examples/mcp_agent.py INDEX "QUESTION"
"""

import asyncio
import sys
from typing import Any

from mcp import Client, StdioServerParameters


async def main(index: str, question: str) -> None:
    server = StdioServerParameters(command=sys.executable, args=["-m", "harness1", "serve", "mcp", "--index", index])
    async with Client(server) as client:

        async def call(name: str, **arguments: Any) -> dict[str, Any]:
            result = await client.call_tool(name, arguments)
            print(*(part.text for part in result.content if part.type == "text"), sep="\n", end="\n\n")
            return result.structured_content or {}

        search = (await call("start_search", question=question))["search"]
        await call("search_corpus", search=search, query=question)
        found = await call("end_search", search=search, reasoning="one search is enough")
        print(*(f"{each['rank']}. {each['title']} ({each['id']})" for each in found["curated"]), sep="\n")


if len(sys.argv) != 3:
    print('usage: python examples/mcp_agent.py INDEX "QUESTION"', file=sys.stderr)
    sys.exit(2)
asyncio.run(main(*sys.argv[1:3]))
