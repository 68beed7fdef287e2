"""The tools of the policy, one file each; a tool's JSON schema is derived from its typed function."""
