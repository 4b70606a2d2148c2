"""Errors that a user can act on. The command line prints them as one line and exits with code 2."""

from __future__ import annotations


class ClawpipeError(Exception):
    """Base of every error whose message is meant for the user: what happened, where, what to do."""


class ConfigError(ClawpipeError):
    """The configuration, or something that it names, cannot be used."""


class TaskError(ClawpipeError):
    """A task row or folder cannot be used. The message names file and row."""


class BrokerError(ClawpipeError):
    """NATS refused, is unreachable, or holds something that we cannot read."""


class EngineError(ClawpipeError):
    """A vLLM engine did not start, died for good, or refused a weight version."""


class SandboxError(ClawpipeError):
    """A sandbox could not be built, started or collected: infrastructure, never the agent's fault."""


class LearnerError(ClawpipeError):
    """The learner refuses a layout, a checkpoint or a batch."""


def one_line(error: BaseException) -> str:
    """The error's message on a single line, as the command line prints it."""
    return " ".join(str(error).split()) or type(error).__name__
