"""What pyproject.toml cannot say: the readme of a package index, and an archive that holds links as links."""

import re
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
LINKS = ("saesteer/loaders", "saesteer/kernels")
if lost := [name for name in LINKS if not (ROOT / name).is_dir()]:
    sys.exit(
        f"saesteer: {lost[0]} is a link, which this checkout lacks; clone the repository with git, where links work, or"
        " install the published package (pip install saesteer)"
    )


def absolute(text: str, repository: str, version: str) -> str:
    """README.md with each link to a file of the repository as an address, of this version."""

    def address(found: re.Match[str]) -> str:
        kind = "raw" if found[1] == "!" else "blob"
        return f"{found[1]}[{found[2]}]({repository}/{kind}/v{version}/{found[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]*)\)", address, text)


class Archive(sdist):
    """The source archive, in which folders that are links in the repository are links as well."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, [one for one in files if not one.startswith(tuple(f"{n}/" for n in LINKS))])
        for name in LINKS:
            (Path(base_dir) / name).symlink_to((ROOT / name).readlink())


project = (ROOT / "pyproject.toml").read_text()
repository, version = (re.search(rf'^{key} = "(.*)"', project, re.MULTILINE) for key in ("Repository", "version"))
assert repository is not None and version is not None
setup(
    long_description=absolute((ROOT / "README.md").read_text(), repository[1], version[1]),
    long_description_content_type="text/markdown",
    cmdclass={"sdist": Archive},
)
