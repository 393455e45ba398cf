"""Chat page of the server: one HTML file that loads nothing else and runs no script but its own."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse

SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


@cache
def chat_page() -> HTMLResponse:
    """The page, with a policy for browsers: they connect to this server alone, and run the script
    of this digest alone."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    (script,) = SCRIPT.findall(text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return HTMLResponse(text, headers=headers | {"X-Content-Type-Options": "nosniff"})
