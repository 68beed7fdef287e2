"""Play an episode by reset and step.

pip install "harness1[gym]"
python examples/gym_loop.py [DATASET INDEX]
"""

import sys
from pathlib import Path

from harness1 import build_index, load_config, open_source
from harness1.adapters.driven import environments
from harness1.adapters.gym_env import SearchGym, action
from harness1.episodes.jobs import EpisodeSetup

if len(sys.argv) not in (1, 3):
    print("usage: python examples/gym_loop.py [DATASET INDEX]", file=sys.stderr)
    sys.exit(2)
dataset, folder = sys.argv[1:3] or ("world:300", "gym.index")
config, source = load_config(), open_source(dataset)
if not Path(folder).exists():
    build_index(source.documents(), Path(folder), config.index)
gym = SearchGym(source.tasks("test"), environments(EpisodeSetup(config, folder, "gymnasium")), config)

context, info = gym.reset(seed=0)
question = next(task.query for task in source.tasks("test") if task.task_id == info["task_id"])
for call in (action("search_corpus", query=question), action("end_search", reasoning="one search is enough")):
    context, reward, terminated, truncated, info = gym.step(call)
print(question, [entry.unit_id for entry in info["episode"].curated], round(reward, 3), sep="\n")
gym.close()
