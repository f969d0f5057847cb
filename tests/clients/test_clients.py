"""What clients and gateways do with the field `saesteer` is what docs/clients.md says of them."""

from collections.abc import Iterator

import pytest

from tools.client_scripts import CLIENTS, Client
from tools.clients import Recorder, measure, recording, stored, tried


def test_each_client_has_a_row() -> None:
    """And one that loses the spec, or all that is reported, has a way out that is not "none needed"."""
    known = stored()
    assert [*known] == [client.name for client in CLIENTS]
    for client in CLIENTS:
        own = known[client.name]
        ways = [own[way] for way in client.ways]
        fine = all(one["arrives"] and one["steered"] and (one["report"] or one["header"]) for one in ways)
        assert fine or not client.out.startswith("none needed") or "looks at the report" in client.out, client.name
        assert own["model"]["steered"], f"{client.name}: a module as model is the way out for everybody"


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    with recording() as found:
        yield found


@pytest.mark.slow
@pytest.mark.long  # pip installs for minutes
@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: str(one.name))
def test_a_client_does_what_its_row_says(client: Client, recorder: Recorder) -> None:
    assert {"tried": tried(client), **measure(client, recorder)} == stored()[client.name]
