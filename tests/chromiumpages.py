"""Pages opened in headless Chromium: the document they become, and what the console said.

No driver is needed: a wrapper page shows the page in a frame, moves its controls by its own script, and writes what it
reads into its own document, which Chromium prints.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
)


def dumped(folder: Path, text: str, *flags: str) -> tuple[str, list[str]]:
    """The document that a page becomes, and the lines of its console."""
    page = folder / "page.html"
    page.write_text(text, encoding="utf-8")
    command = [BROWSER, *FLAGS, *flags, "--dump-dom", f"--user-data-dir={folder / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def asked(folder: Path, text: str, script: str, width: int = 1200, *flags: str) -> tuple[object, list[str]]:
    """What `script`, the body of an async function of the page's `document` and `window`, returns as JSON."""
    quoted = json.dumps(text).replace("</", "<\\/")
    wrapper = f"""<!DOCTYPE html><body><iframe id="frame" style="border: 0; width: {width}px; height: 900px"></iframe>
        <pre id="result"></pre><script>const frame = document.getElementById("frame");
        frame.onload = async () => {{
            const ask = async (document, window) => {{ {script} }};
            const answer = await ask(frame.contentDocument, frame.contentWindow);
            document.getElementById("result").textContent = "BEGIN" + JSON.stringify(answer) + "END";
        }};
        frame.srcdoc = {quoted};</script>"""
    dom, console = dumped(folder, wrapper, *flags)
    (found,) = re.findall(r"BEGIN(.*?)END</pre>", dom, re.DOTALL)
    for sign, code in (("<", "&lt;"), (">", "&gt;"), ("&", "&amp;")):
        found = found.replace(code, sign)
    return json.loads(found), console
