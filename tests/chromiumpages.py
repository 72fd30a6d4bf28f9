"""Pages opened in headless Chromium: the document they become, and what the console said.

No driver is needed: a wrapper page shows the page in a frame, moves its controls by its own script, and writes what it
reads into its own document, which Chromium prints.
"""

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TINY = ("--hidden", "6", "--steps", "20", "--device", "cpu", "--quiet")
HOSTILE = """</script><script>document.title="broken"</script><img src=x onerror="document.title='broken'">"""
AXE = Path(os.environ.get("POSTERITY_AXE", Path(__file__).parents[1] / "node_modules/axe-core/axe.min.js"))
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


def hostile_table(path, numbers):
    """A table whose name, columns, categories and classes are HTML."""
    draw, lines = random.Random(0), []
    for _ in range(90):
        a, b, kind = draw.gauss(0, 1), draw.gauss(0, 1), draw.choice(["<b>x</b>", "y & z"])
        target = 1000 * a + draw.gauss(0, 100) if numbers else ("<i>no</i>", HOSTILE.replace('"', '""'))[a + b > 0]
        lines.append(f'{a:.3f},{b:.3f},{kind},"{target}"')
    named = HOSTILE.replace('"', '""')
    path.write_text("\n".join([f'a,"{named}",kind,"{named} y"', *lines]), encoding="utf-8")
    return path, f"{HOSTILE} y"


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
