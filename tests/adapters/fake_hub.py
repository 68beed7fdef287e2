"""The Hugging Face hub, as far as its client asks it while a folder is sent."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support import Ask, Reply, replying


class FakeHub:
    """Repositories by kind and name.

    Attributes:
        private: whether each repository is.
        files: what was committed, by repository and name.
        tokens: the authorisations that came; `sent` is the last.
        failing: the status that every request is answered with; 0: none.
    """

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.tokens: set[str] = set()
        self.failing, self.sent = 0, ""
        self.address = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if self.failing:
            return self.failing, {"error": f"you sent {self.sent}"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['type']}s/{asked['organization']}/{asked['name']}"
            known = name in self.private
            self.private.setdefault(name, asked["visibility"] == "private")
            return 409 if known else 200, {"url": f"{self.address}/{name.removeprefix('models/')}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        found = re.fullmatch(r"/api/((?:dataset|model)s/[^/]+/[^/]+)(?:/(preupload|commit)/main)?", path)
        if found is None or found[1] not in self.private:
            return 404, {"error": f"no {method} {path}"}
        name = found[1]
        if found[2] == "preupload":
            given = json.loads(body)["files"]
            modes = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in given]
            return 200, {"files": modes}
        if found[2] == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.files.setdefault(name, {})[line["value"]["path"]] = content
            return 200, {"commitUrl": f"{self.address}/{name}/commit/c0ffee", "commitOid": "c0ffee"}
        known = {"id": name.partition("/")[2], "private": self.private[name]}
        return 200, {**known, "sha": "0", "tags": [], "downloads": 0}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    def reply(asked: Ask) -> Reply:
        hub.sent = str({name.lower(): value for name, value in asked.headers.items()}.get("authorization"))
        hub.tokens.add(hub.sent)
        status, value = hub.answer(asked.method, asked.path.partition("?")[0], asked.body)
        return status, {"Content-Type": "application/json"}, json.dumps(value).encode()

    with replying(reply) as hub.address:
        yield hub
