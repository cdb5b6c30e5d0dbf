"""What a server that is full says, before it has read a body: parsing, templates and tokens of the
requests that it refuses would take the time of those that it answers."""

from starlette.responses import Response
from starlette.types import Scope

from llmserve.server.access import error_response, write_line
from llmserve.server.context import ServerContext
from llmserve.server.http.auth import KeyCheck
from llmserve.server.http.head import given_request_id, header_bytes
from llmserve.server.running.job import new_id

# Those that a model answers.
_PATHS = (
    *("/completions", "/chat/completions", "/embeddings", "/responses", "/messages"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/invocations", "/completion"),
    *("/api/v0/completions", "/api/v0/chat/completions", "/api/v0/embeddings"),
    "/replica/run",
)


class EarlyRefusal:
    """Of one server. Used on the loop's thread."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self._keys = KeyCheck(server.settings)
        self._paths = {*_PATHS, *("/v1" + path for path in _PATHS)}

    def refuses(self, scope: Scope) -> bool:
        """Whether a request whose head has come would be refused (429) whatever is in its body.
        Everything that has more to it goes its way: a key that is wrong, a page that has to be told
        that it may read the answer."""
        if scope["path"] not in self._paths or scope["method"] != "POST":
            return False
        if header_bytes(scope, b"origin") or not self._server.activity.is_full:
            return False
        return self._keys.refusal(scope) is None

    def answer(self, scope: Scope) -> Response:
        """What it is told, with its line in the log and its count."""
        error = self._server.activity.refusal()
        given_id, own_id = given_request_id(scope), new_id("req")
        scope["llmserve.error"], scope["llmserve.request_id"] = error, own_id  # for the log
        self._server.metrics.count_answer(error.status)
        write_line(scope, error.status, 0.0, given_id)
        shown_id = given_id.decode("ascii") or own_id
        return error_response(scope["path"], error, {"x-request-id": shown_id})
