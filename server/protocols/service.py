"""The side of the server that protocols see."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.models import LoadedModel, Model, Models
from mlx_redrafter.server.protocols.writer import Writer
from mlx_redrafter.server.requests import TextRequest
from mlx_redrafter.server.stored_responses import StoredResponses

Read = TypeVar("Read")


class Fitted(NamedTuple):
    """A request that fits its model.

    Attributes:
        model: The model.
        loaded: The model in memory.
        request: The request, within the model's sizes.
        prompts: Token ids of its prompts.
    """

    model: Model
    loaded: LoadedModel
    request: TextRequest
    prompts: list[list[int]]


class Service(Protocol):
    """The functions that the endpoints of a protocol use.

    Attributes:
        models: Models that requests may name.
        stored: Responses that clients may continue.
    """

    stored: StoredResponses

    @property
    def models(self) -> Models: ...

    async def read(
        self, client: Request, reader: Callable[[object, GenerationOptions], Read]
    ) -> Read:
        """Read the JSON body of a request, next to the event loop.

        Args:
            client: The request.
            reader: Function of the body and the server's options of texts.

        Raises:
            Refusal: The body is too large, too slow or malformed, or the reader refuses it.
        """

    async def fit(self, client: Request, request: TextRequest) -> Fitted:
        """Load the model of a request, and check the request against it.

        Raises:
            Refusal: The request does not fit the model.
        """

    async def write(
        self, client: Request, request: TextRequest, make_writer: Callable[[str], Writer]
    ) -> Response:
        """Write the texts of a request.

        Args:
            client: The request as HTTP.
            request: The request.
            make_writer: Function that makes the writer from the name of the model.

        Raises:
            Refusal: The request does not fit the model, or has failed.
        """


# A function that answers a request.
Endpoint = Callable[[Service, Request], Awaitable[Response]]
# Endpoints of a protocol by method and path, and its error object.
Routes = dict[tuple[str, str], Endpoint]
ErrorFormat = Callable[[Any], dict[str, Any]]
