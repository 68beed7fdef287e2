"""The tools of the policy; the JSON schema of a tool is derived from its typed function."""
