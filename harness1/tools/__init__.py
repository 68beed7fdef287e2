"""The tools of the policy, one file each; the JSON schema of a tool is derived from its typed function."""
