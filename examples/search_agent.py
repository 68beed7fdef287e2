"""An agent that searches: a model adds words to the question, and chooses among the documents that are found.

pip install "harness1[serve,train]"
harness1 serve retrieve --index INDEX --port 8000
harness1 rl agents --command "python $PWD/examples/search_agent.py http://127.0.0.1:8000" \
    --evaluate examples/search_reward.py:f1 --data DATASET --upstream hf:MODEL --config rl/small --out OUT
"""

import json
import re
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from openai import OpenAI

HITS, LETTERS = 5, 80
if len(sys.argv) != 2:
    print("usage: python examples/search_agent.py ADDRESS, as `harness1 rl agents` runs it", file=sys.stderr)
    sys.exit(2)
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages: list[dict[str, str]] = []


def ask(text: str) -> str:
    messages.append({"role": "user", "content": text})
    reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
    messages.append({"role": "assistant", "content": reply})
    return reply


question = json.loads(Path("task.json").read_text())["query"]
words = ask(f"Question: {question}\nWhich words shall be searched for beside it?")
body = json.dumps({"queries": [f"{question} {words}"], "topk": HITS}).encode()
with urlopen(Request(f"{sys.argv[1]}/retrieve", body, {"Content-Type": "application/json"}), timeout=60) as answer:
    hits = json.load(answer)["result"][0]
texts = [hit["contents"].replace("\n", ": ", 1)[:LETTERS] for hit in hits]
shown = "\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1))
numbers = set(map(int, re.findall(r"\d{1,3}", ask(f"{shown}\nWrite the numbers of the documents that answer it."))))
Path("delivered.txt").write_text("".join(f"{hit['id']}\n" for number, hit in enumerate(hits, 1) if number in numbers))
