"""Look at the built site in a browser, at the width of a phone and of a desktop, in light and dark mode.

A page fails if it scrolls sideways, if the browser's console has an error, or if axe finds a violation of WCAG 2 A
or AA, such as low contrast or an image without a text. With --screenshots DIRECTORY, each page is also saved as a
picture. Without Chromium or Chrome it prints a message and succeeds.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

SITE = Path(__file__).resolve().parents[1] / "build/site"
VIEWS = {"phone": (390, 844, "light"), "desktop": (1280, 900, "light"), "dark": (1280, 900, "dark")}
# Without preload: axe would ask for imported style sheets at addresses that do not exist.
RULES = {"preload": False, "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}}


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def console_of(page: Page) -> list[str]:
    """A list to which the browser adds errors of the console, of programs and of addresses."""
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("response", lambda answer: errors.append(answer.url) if answer.status >= 400 else None)
    return errors


def problems_of(page: Page, axe: Axe | None) -> list[str]:
    found = []
    width = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    if width[0] > width[1]:
        found.append(f"scrolls sideways: {width[0]} pixels in a view of {width[1]}")
    if axe is not None:
        for violation in axe.run(page, options=RULES).response["violations"]:
            places = ", ".join(node["html"][:120] for node in violation["nodes"][:3])
            found.append(f"{violation['help']}: {len(violation['nodes'])} times, such as {places}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="only these, such as docs/start.html")
    parser.add_argument("--screenshots", type=Path)
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("== neither Chromium nor Chrome is installed, so no page is looked at")
        return 0
    # index.html only leads to the first page.
    found = [str(file.relative_to(SITE)) for file in sorted(SITE.glob("**/*.html"))]
    pages = arguments.pages or [name for name in found if not name.startswith(("_static/", "index.html"))]
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    failed = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for view, (width, height, scheme) in VIEWS.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            console = console_of(page)
            for name in pages:
                console.clear()
                page.goto(f"{address}/{name}", wait_until="load")
                problems = problems_of(page, None if view == "phone" else Axe()) + console
                failed += bool(problems)
                for problem in problems:
                    print(f"{name}, {view}: {problem}")
                if arguments.screenshots:
                    arguments.screenshots.mkdir(parents=True, exist_ok=True)
                    file = f"{name.replace('/', '-').removesuffix('.html')}-{view}.png"
                    page.screenshot(path=arguments.screenshots / file)
            context.close()
        browser.close()
    print(f"== looked at {len(pages)} pages in {len(VIEWS)} views: {failed} with a problem")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
