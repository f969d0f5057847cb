"""What a worker's engine takes of its device, by kind. Knows tensors, and nothing of requests."""

from saesteer.engine.engine import Engine


def device_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of each kind that the engine has taken by now; what reads take comes with the first request that reads."""
    sites = engine.sites.values()
    weights = [one for site in sites for one in (site.w_enc, site.w_dec, site.b_enc, site.threshold, site.b_dec)]
    tables = [engine.table, engine.work, engine.counts, engine.site_numbers]
    for site in [*sites][:1]:  # all sites share these
        tables += [site.cells, site.registers, site.scratch]
    tables += {site.kept.data_ptr(): site.kept for site in sites if site.kept is not None}.values()
    return {
        "dictionaries and vectors": sum(one.nbytes for one in weights),
        "tables and scratch": sum(one.nbytes for one in tables),
        "reads": engine.captures.taken,
    }


def described(engine: Engine) -> str:
    """The same in words, with what reads may come to at most."""
    *fixed, (reads, taken) = device_bytes(engine).items()
    words = [f"{number / 2**20:,.0f} MiB for {kind}" for kind, number in fixed]
    most = f"{engine.captures.most / 2**20:,.0f}"
    return f"{', '.join(words)}, {taken / 2**20:,.0f} MiB for {reads}, {most} once requests have read at every site"
