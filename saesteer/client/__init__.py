"""HTTP clients for a server with saesteer. This room knows HTTP, but no engine and no torch."""

from saesteer.client.client import AsyncClient, Client
from saesteer.client.responses import Answer, numbers

__all__ = ["Answer", "AsyncClient", "Client", "numbers"]
