"""Chat completions by a model whose tokens are sampled here or by ids, for judges without a server."""

from __future__ import annotations

from harness1.env.render.pieces import Role, piece
from harness1.http.completions import Completion, Messages
from harness1.models.backend import Backend
from harness1.models.formats.chat_format import ChatFormat, joined
from harness1.records import Sampling

ROLES: dict[str, Role] = {"system": "system", "user": "user"}


class BackendCompleter:
    """Completes conversations of texts at temperature 0, with a `Backend`."""

    def __init__(self, backend: Backend, chat: ChatFormat, most_tokens: int) -> None:
        self._backend, self._chat, self.most_tokens = backend, chat, most_tokens

    async def complete(self, messages: Messages) -> Completion:
        """Return the reply to system and user messages; raise as the backend does."""
        groups = [[piece("message", ROLES[message["role"]], message["content"])] for message in messages]
        prompt = [*joined(self._chat.messages(groups, ())), *self._chat.prompt_end().ids]
        sampling = Sampling(temperature=0.0, max_tokens=self.most_tokens, stop_ids=self._chat.stop_ids)
        output = await self._backend.generate(prompt, sampling)
        said = [token for token in output.output_ids if token not in self._chat.stop_ids]
        text = self._chat.tokenizer.decode(said)
        return Completion(text, output.finish_reason, len(prompt), len(output.output_ids))
