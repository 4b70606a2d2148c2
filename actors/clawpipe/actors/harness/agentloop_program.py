"""agentloop: a small, readable tool loop over the OpenAI Chat Completions API.

This file is a program of its own: it runs inside the sandbox, with nothing but the standard library, its
current folder is the workspace, and it knows nothing of training. It asks the model, runs the tools that the
model calls, appends their results, and asks again, until the model calls `finish` or has had its turns.

    agentloop_program.py [--system TEXT] [--max-turns N] [--max-tokens N] [--stream] PROMPT

OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL say whom to ask. Exit code 0 when the loop came to its end,
1 with a last line that says why when the provider did not answer, 2 when it was called wrongly.
"""

from __future__ import annotations

import contextlib
import getopt
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

JsonObject = dict[str, Any]

MAX_OUTPUT_CHARS = 30_000  # of one tool result
MAX_LISTED_FILES = 500
COMMAND_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 600.0
MAX_RETRIES = 5
FIRST_BACKOFF_S = 0.25
RETRIED_STATUS = (408, 409, 429)  # and every 5xx

NO_TOOL_CALL = "No tool was called. Call one tool per turn, and finish at the end."
DONE = "ok"


def _tool(name: str, description: str, *arguments: str) -> JsonObject:
    """A tool's schema; every argument is a required string."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"} for argument in arguments},
        "required": list(arguments),
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("read_file", "The text of a file.", "path"),
    _tool("write_file", "Writes a file, with the folders it needs.", "path", "content"),
    _tool("list_files", "The paths of all files."),
    _tool("run_command", "Runs a shell command; gives its output.", "command"),
    _tool("finish", "Ends the work."),
]
ARGUMENTS = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}


class ProviderError(Exception):
    """The model's provider refused the request, or stayed away."""


class ToolError(Exception):
    """What the model did wrong, in words for the model."""


class Tools:
    """The tools, on one workspace. `run` never raises for what a model can do wrong."""

    def __init__(self, workspace: str) -> None:
        self.workspace = os.path.realpath(workspace)

    def run(self, name: str, arguments: str) -> str:
        """The result of one call; `arguments` is the JSON text that the model wrote."""
        try:
            given = parse_arguments(name, arguments)
            tool: Callable[..., str] = getattr(self, name)
            return shorten(tool(**given))
        except ToolError as err:
            return f"error: {err}"
        except (OSError, ValueError) as err:
            return f"error: {getattr(err, 'strerror', None) or err}"

    def read_file(self, path: str) -> str:
        with open(self._inside(path), encoding="utf-8", errors="replace", newline="") as file:
            return file.read(MAX_OUTPUT_CHARS + 1)

    def write_file(self, path: str, content: str) -> str:
        target = self._inside(path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="utf-8", newline="") as file:
            file.write(content)
        return DONE

    def list_files(self) -> str:
        paths = [
            os.path.relpath(os.path.join(folder, name), self.workspace)
            for folder, _, names in os.walk(self.workspace)
            for name in names
        ]
        listed = sorted(paths)[:MAX_LISTED_FILES]
        if len(paths) > len(listed):
            listed.append(f"and {len(paths) - len(listed)} more")
        return "\n".join(listed) or "no files"

    def run_command(self, command: str) -> str:
        argv = ["/bin/sh", "-c", command]
        process = subprocess.Popen(
            argv,
            cwd=self.workspace,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with process:
            output, in_time = read_output(process, COMMAND_TIMEOUT_S)
            if not in_time:
                os.killpg(process.pid, signal.SIGKILL)
                return f"{output}\nerror: stopped after {COMMAND_TIMEOUT_S:.0f} s"
        return output if process.returncode == 0 else f"{output}\nexit code {process.returncode}"

    def finish(self) -> str:
        return DONE

    def _inside(self, path: str) -> str:
        target = os.path.realpath(os.path.join(self.workspace, path))
        if not target.startswith(self.workspace + os.sep):
            raise ToolError("the path is outside the workspace")
        return target


def parse_arguments(name: str, text: str) -> dict[str, str]:
    """The call's arguments. ToolError unless they are exactly the tool's, all of them strings."""
    if name not in ARGUMENTS:
        raise ToolError(f"there is no tool {name}")
    try:
        given = json.loads(text or "{}")
    except ValueError:
        raise ToolError("the arguments are not valid JSON") from None
    wanted = ARGUMENTS[name]
    if not isinstance(given, dict) or sorted(given) != sorted(wanted):
        raise ToolError(f"{name} takes {' and '.join(wanted) or 'no arguments'}")
    if not all(isinstance(value, str) for value in given.values()):
        raise ToolError("every argument is a string")
    return given


def shorten(text: str) -> str:
    """The text, or its beginning and a note when it is longer than a tool result may be."""
    if len(text) <= MAX_OUTPUT_CHARS:
        return text
    return f"{text[:MAX_OUTPUT_CHARS]}\n... cut after {MAX_OUTPUT_CHARS} characters"


def read_output(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[str, bool]:
    """What the process says until it ends or its time is over, and whether it ended in time.

    Waits for the process, not for the pipe: a child left in the background may hold the pipe open.
    Output beyond four times the limit of a result (UTF-8 has up to four bytes per character) is dropped.
    """
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)
    output, deadline = bytearray(), time.monotonic() + timeout_s
    ended = False
    while not ended and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.01)
        ended = process.returncode is not None
        with contextlib.suppress(BlockingIOError):  # one read takes all that a pipe can hold
            output += os.read(pipe, 65536)[: max(0, 4 * (MAX_OUTPUT_CHARS + 1) - len(output))]
    return output.decode("utf-8", "replace"), ended


class Provider:
    """The OpenAI API at `base_url`, asked as an ordinary client does: with retries, without state."""

    def __init__(self, base_url: str, api_key: str) -> None:
        scheme, _, rest = base_url.partition("://")
        self._https = scheme == "https"
        self._host, slash, path = rest.partition("/")
        self._path = f"{slash}{path}".rstrip("/") + "/chat/completions"
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}

    def ask(self, body: JsonObject) -> JsonObject:
        """The assistant's message. ProviderError on a refusal, or when the last retry failed too."""
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        for attempt in range(MAX_RETRIES + 1):
            if attempt:
                time.sleep(FIRST_BACKOFF_S * 2 ** (attempt - 1))
            try:
                return self._post(data, bool(body.get("stream")))
            except (OSError, http.client.HTTPException) as err:
                problem = f"{type(err).__name__}: {err}"
            except (ValueError, LookupError, TypeError) as err:
                raise ProviderError(f"the answer cannot be read ({err!r})") from err
        raise ProviderError(f"no answer after {MAX_RETRIES + 1} tries ({problem})")

    def _post(self, data: bytes, stream: bool) -> JsonObject:
        make = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = make(self._host, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.request("POST", self._path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response)
            return read_stream(response) if stream else read_message(response.read())
        finally:
            connection.close()


def _refusal(response: http.client.HTTPResponse) -> Exception:
    """What to raise for a status other than 200: OSError where another try may help."""
    text = f"HTTP {response.status}: {response.read(2000).decode('utf-8', 'replace')}"
    again = response.status >= 500 or response.status in RETRIED_STATUS
    return OSError(text) if again else ProviderError(text)


def read_message(data: bytes) -> JsonObject:
    """The message of a whole answer."""
    message: JsonObject = json.loads(data)["choices"][0]["message"]
    return message


def read_stream(lines: Iterator[bytes]) -> JsonObject:
    """The message that a stream of server-sent events builds. OSError when the stream ends too early."""
    content = ""
    calls: dict[int, JsonObject] = {}
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            message: JsonObject = {"role": "assistant", "content": content or None}
            return message | ({"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {})
        event = json.loads(data)
        if "error" in event:
            raise ProviderError(f"the stream ended with an error: {event['error']}")
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or []:
                _add_call(calls, part)
    raise OSError("the stream ended before [DONE]")


def _add_call(calls: dict[int, JsonObject], part: JsonObject) -> None:
    empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    call = calls.setdefault(part["index"], empty)
    call["id"] = part.get("id") or call["id"]
    for key, text in (part.get("function") or {}).items():
        call["function"][key] += text or ""


def repeat(message: JsonObject) -> JsonObject:
    """The assistant's message as it is sent back with the next request."""
    said = {"role": "assistant", "content": message.get("content")}
    return said | ({"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {})


def answer(message: JsonObject, tools: Tools) -> tuple[list[JsonObject], bool]:
    """Runs the message's calls in order. The messages that answer it, and whether `finish` was called."""
    calls = message.get("tool_calls") or []
    if not calls:
        return [{"role": "user", "content": NO_TOOL_CALL}], False
    answers: list[JsonObject] = []
    for call in calls:
        name = call["function"]["name"]
        result = tools.run(name, call["function"]["arguments"])
        answers.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if name == "finish" and result == DONE:
            return answers, True
    return answers, False


def opening(system: str, prompt: str) -> list[JsonObject]:
    """The messages of the first request."""
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def loop(provider: Provider, tools: Tools, request: JsonObject, max_turns: int) -> str:
    """Turn after turn, until the model calls `finish` or has had its turns. Why it ended.

    `request` is the first request's body. It is sent again in every turn with the messages that came since.
    """
    messages = request["messages"]
    for _ in range(max_turns):
        message = provider.ask(request)
        messages.append(repeat(message))
        answers, finished = answer(message, tools)
        messages += answers
        if finished:
            return "finished"
    return "out of turns"


def main(argv: list[str]) -> int:
    try:
        pairs, rest = getopt.getopt(argv, "", ["system=", "max-turns=", "max-tokens=", "stream"])
        (prompt,) = rest
        options = dict(pairs)
        max_turns, max_tokens = int(options["--max-turns"]), int(options["--max-tokens"])
        provider = Provider(os.environ["OPENAI_BASE_URL"], os.environ.get("OPENAI_API_KEY", ""))
        model = os.environ["OPENAI_MODEL"]
    except (getopt.GetoptError, ValueError, KeyError) as err:
        sys.stderr.write(f"{__doc__}\nagentloop: called wrongly ({err!r})\n")
        return 2
    request: JsonObject = {
        "model": model,
        "messages": opening(options.get("--system", ""), prompt),
        "tools": TOOLS,
        "max_tokens": max_tokens,
    }
    if "--stream" in options:
        request["stream"] = True
    try:
        sys.stdout.write(f"agentloop: {loop(provider, Tools('.'), request, max_turns)}\n")
    except ProviderError as err:
        sys.stderr.write(f"agentloop: {err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
