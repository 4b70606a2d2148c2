"""The rollout side of clawpipe: serving proxy, sandboxes, harnesses, tasks, verifiers, engines."""
