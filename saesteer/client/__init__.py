"""HTTP clients for a server with saesteer. This room knows HTTP, but no engine and no torch."""

from saesteer.client.client import AsyncClient, Client
from saesteer.client.responses import Answer
from saesteer.client.results import Capture, numbers

__all__ = ["Answer", "AsyncClient", "Capture", "Client", "numbers"]
