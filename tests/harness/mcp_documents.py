"""A small folder of documents for tests of the stock MCP server, and a client that runs in the sandbox beside it."""

from __future__ import annotations

from pathlib import Path

SECRET = "the heron nests on the north bank"  # in no file but one, and in no prompt

# Starts the server as a harness does, with the arguments of this program as its command; says what it was told.
CLIENT = """\
import json, resource, sys, time
sys.path.insert(0, "/opt/clawpipe-mcp")
began = time.monotonic()
import anyio
from mcp import ClientSession, StdioServerParameters, stdio_client
imported = time.monotonic()

async def main():
    asked = json.loads(open("/work/calls.json").read())
    server = StdioServerParameters(command=sys.argv[1], args=sys.argv[2:])
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        started = time.monotonic()
        tools = [tool.name for tool in (await session.list_tools()).tools]
        answers = []
        for name, arguments in asked:
            result = await session.call_tool(name, arguments)
            answers.append([result.is_error, result.content[0].text])
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = {"start_s": started - imported, "server_cpu_s": usage.ru_utime + usage.ru_stime, "kb": usage.ru_maxrss}
    print(json.dumps({"tools": tools, "answers": answers, **spent}))

anyio.run(main)
"""


def write_documents(folder: Path) -> Path:
    """Notes on birds, one of which holds SECRET, with a file that is no text and a link that leads out."""
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "heron.md").write_text(f"# Herons\n\nSeen at dawn.\n{SECRET.capitalize()}.\n")
    (folder / "notes" / "owl.md").write_text("# Owls\n\nThe owl hunts at night.\n" + "Nothing new.\n" * 40)
    (folder / "index.txt").write_text("heron: notes/heron.md\nowl: notes/owl.md\n")
    (folder / "owl.bin").write_bytes(b"owl\0owl")
    (folder / "out").symlink_to("/etc/passwd")
    return folder
