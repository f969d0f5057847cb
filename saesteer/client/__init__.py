"""HTTP clients for a server with saesteer. They know the wire, and neither an engine nor torch."""

from saesteer.client.client import AsyncClient, Client
from saesteer.client.responses import Answer

__all__ = ["Answer", "AsyncClient", "Client"]
