"""Takes the pictures of the playground that the README and its page show: the real server's page, in headless Chromium.

Each is the page as it opens, in 128 colours, which keeps it below 100 kB.
"""

import io
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from tests.plugin.pages import browser, first_answer
from tests.plugin.serving import served

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
# Name, width and height of the window, colour scheme.
WINDOWS = (
    ("playground", 1280, 740, "light"),
    ("playground-dark", 768, 830, "dark"),
)


def main() -> None:
    """Start the server and take the pictures."""
    PICTURES.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, served(["demo"], Path(folder) / "log") as client:
        for name, width, height, scheme in WINDOWS:
            with browser(viewport={"width": width, "height": height}, color_scheme=scheme) as page:
                page.goto(f"{client.base_url}/saesteer/")
                first_answer(page)
                page.locator("button.main:enabled").wait_for()
                taken = Image.open(io.BytesIO(page.screenshot()))
            file = PICTURES / f"{name}.png"
            taken.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)
            print(f"{file.name}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
