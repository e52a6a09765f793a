"""Checks a built site: `python docs/_tools/check_site.py site`.

- No page or stylesheet loads anything from another host.
- Every link inside the site leads to a page, and to an anchor on it that exists.
- Every page can be reached from the navigation, and the search index knows it.
"""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
LOADED |= {"audio": "src", "embed": "src", "object": "data", "use": "href", "image": "href"}
NOT_LOADED = {"canonical", "prev", "next", "alternate", "license", "author"}
IN_STYLE = re.compile(r"""@import\s+["']([^"']+)|url\(\s*["']?([^"')]+)""")
HOME = "http://site/"


class Page(HTMLParser):
    """The anchors of a page, the links on it, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.in_style = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.in_style = tag == "style"
        self.anchors.update(filter(None, (attrs.get("id"), attrs.get("name"))))
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        if tag == "link" and attrs.get("href") and attrs.get("rel") not in NOT_LOADED:
            self.loaded.append(attrs["href"])
        if attrs.get(LOADED.get(tag)):
            self.loaded.append(attrs[LOADED[tag]])
        self.loaded += [part.split()[0] for part in (attrs.get("srcset") or "").split(",") if part]
        self.loaded += in_style(attrs.get("style") or "")

    def handle_data(self, data):
        if self.in_style:
            self.loaded += in_style(data)


def in_style(text):
    """The addresses that a stylesheet loads."""
    return [a or b for a, b in IN_STYLE.findall(text)]


def check(site):
    """The faults of a site, as lines of text."""
    pages = {address(site, path): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    styles = {address(site, path): path.read_text() for path in sorted(site.rglob("*.css"))}
    faults = []
    if not pages:
        return [f"{site} has no pages"]

    def local(base, target):
        """The file of the site that an address means, or `None` for another host."""
        parts = urlsplit(urljoin(base, target))
        if parts.scheme not in ("http", "https") or parts.netloc != urlsplit(HOME).netloc:
            return None, parts
        return site / unquote(parts.path).lstrip("/"), parts

    def check_loaded(base, target):
        if target.startswith(("data:", "#")):
            return
        path, _ = local(base, target)
        if path is None:
            faults.append(f"{base} loads {target} from another host")
        elif not path.is_file():
            faults.append(f"{base} loads {target}, which does not exist")

    for base, text in styles.items():
        for target in in_style(re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)):
            check_loaded(base, target)
    for base, page in pages.items():
        for target in page.loaded:
            check_loaded(base, target)
        if base.endswith("/404.html"):
            continue
        for target in page.links:
            path, parts = local(base, target)
            if path is None:
                continue
            where = HOME + parts.path.lstrip("/")
            where = where.removesuffix("index.html")
            if where not in pages and not path.is_file():
                faults.append(f"{base} links to {target}, which does not exist")
            elif parts.fragment and where in pages:
                anchor = unquote(parts.fragment)
                if anchor not in pages[where].anchors and anchor not in ("", "__comments"):
                    faults.append(f"{base} links to {target}: the page has no such anchor")

    first = pages.get(HOME)
    linked = {urljoin(HOME, link).partition("#")[0] for link in first.links} if first else set()
    index = json.loads((site / "search" / "search_index.json").read_text())
    searched = {urljoin(HOME, entry["location"]).partition("#")[0] for entry in index["docs"]}
    for base in pages:
        if base.endswith("/404.html"):
            continue
        if base not in linked:
            faults.append(f"{base} is not in the navigation")
        if base not in searched:
            faults.append(f"{base} is not in the search index")
    return faults


def address(site, path):
    return HOME + path.relative_to(site).as_posix().removesuffix("index.html")


if __name__ == "__main__":
    found = check(Path(sys.argv[1]))
    print("\n".join(found) or "the site is in order")
    sys.exit(bool(found))
