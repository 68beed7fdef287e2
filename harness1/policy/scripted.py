"""The scripted policy."""
from harness1.policy.single_shot import SingleShotPolicy as ScriptedPolicy
