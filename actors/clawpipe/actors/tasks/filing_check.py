"""The grader of the filing tasks: runs in the grader's sandbox, prints its four checks as a JSON object.

    check.py WORKSPACE

expected.json beside it holds {"path", "content", "files"}: the wanted file, its text, and the workspace as
it was given, {path: text}. The checks: `exists` any new file; `name` the wanted path; `content` its text;
`clean` the wanted path is there and nothing else has changed.
"""

import json
import os
import sys


def read_workspace(root: str) -> dict[str, str]:
    """{path: text} of every regular file; other things have the text ""."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = read_text(path)
    return found


def read_text(path: str) -> str:
    if os.path.islink(path) or not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(1 << 20)


def checks(found: dict[str, str], path: str, content: str, given: dict[str, str]) -> dict[str, bool]:
    new = found.keys() - given.keys()
    unchanged = all(found.get(name) == text for name, text in given.items())
    return {
        "exists": bool(new),
        "name": path in new,
        "content": path in new and found[path].strip() == content,
        "clean": new == {path} and unchanged,
    }


def main() -> None:
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "expected.json")) as file:
        expected = json.load(file)
    found = read_workspace(sys.argv[1])
    verdict = checks(found, expected["path"], expected["content"], expected["files"])
    sys.stdout.write(json.dumps(verdict) + "\n")


if __name__ == "__main__":
    main()
