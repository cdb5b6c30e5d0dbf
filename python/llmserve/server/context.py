"""What every route of one server shares."""

from dataclasses import dataclass, field

from starlette.requests import Request

from llmserve.server.metrics import ServerMetrics
from llmserve.server.models import Models
from llmserve.server.running.activity import Activity
from llmserve.server.running.background import BackgroundRuns
from llmserve.server.settings import ServerSettings
from llmserve.server.stored_responses import StoredResponses
from llmserve.server.tracing import Tracing


@dataclass(frozen=True, slots=True)
class ServerContext:
    """One server."""

    settings: ServerSettings
    models: Models
    activity: Activity
    metrics: ServerMetrics
    tracing: Tracing | None
    background: BackgroundRuns
    responses: StoredResponses = field(default_factory=StoredResponses)


def context(request: Request) -> ServerContext:
    """The server that a request came to."""
    server = request.app.state.server
    assert isinstance(server, ServerContext)
    return server
