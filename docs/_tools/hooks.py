"""Hooks of the build, which `mkdocs.yml` names."""

import re

ERROR = re.compile(r'<div class="language-text highlight">(?=<pre>(?:<[^>]+>)*[\w.]+Error: )')


def on_page_content(html, **_):
    """Marks error messages, whose long lines are wrapped; those of tables and code are not."""
    return ERROR.sub('<div class="language-text highlight wrapped">', html)
