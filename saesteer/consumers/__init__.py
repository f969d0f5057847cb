"""Consumers: code of the operator that gets what requests read; what one is, how it runs, and those that are built in.

A consumer runs in the front end, in a thread of its own behind a bounded queue, so it blocks no step of the engine. It
knows neither vLLM nor HTTP. docs/consumers.md shows how to write one.
"""

from saesteer.consumers.consumer import Array, Consumer, DiskError, Request, Rows
from saesteer.consumers.known import register

__all__ = ["Array", "Consumer", "DiskError", "Request", "Rows", "register"]
