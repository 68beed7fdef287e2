"""Play episodes and replay them.

`rollout` plays one episode. `processes.run_episodes` plays many: those of a language model in one event loop
(`staged`, over the general `stages`), those of any other policy over worker processes (`processes`). `jobs` describes
the episodes to both.
"""
