"""Turns the formulas of docstrings, written in Unicode for `help()`, into MathML for the site.

Browsers draw MathML without JavaScript. A line such as `uₜ = m̂ₜ / (√v̂ₜ + ε)` is read with the usual
precedence: a product binds tighter than a sum, and `/` makes a fraction of the product to its left
and the one factor to its right. Gaps of three spaces and words separate formulas.
"""

import html
import re
import unicodedata

SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ᵢₖₗₙₜ", "0123456789+−ikℓnt")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿᵗᵖᵀᴴ", "0123456789+−ntpTH")
FUNCTIONS = {
    "argmin",
    "clip",
    "cos",
    "fn",
    "lmo",
    "max",
    "mean",
    "measure",
    "min",
    "orth",
    "rms",
    "sign",
}
CLOSING = {"(": ")", "⟨": "⟩", "{": "}", "|": "|", "‖": "‖"}
ACCENTS = {"\u0302": "^", "\u0304": "¯"}

TOKEN = re.compile(
    r"""(?P<space>\s+)
    | (?P<code>`[^`]+`)
    | (?P<number>\d+(?:\.\d+)?|½)
    | (?P<name>(?:[A-Za-z]{2,}|[A-Za-zͰ-Ͽℓ])(?:_[A-Za-zͰ-Ͽ]+)*)
    | (?P<accent>[\u0302\u0304])
    | (?P<sub>[₀-₉₊₋ᵢₖₗₙₜ]+)
    | (?P<sup>[⁰¹²³⁴-⁹⁺⁻ⁿᵗᵖᵀᴴ]+)
    | (?P<other>.)""",
    re.VERBOSE,
)


def to_html(block: str) -> str:
    """A block of formulas, one or several to a line, as a `<div>`."""
    lines = []
    for line in block.strip("\n").split("\n"):
        parts = [part for part in re.split(r"\s{3,}", line.strip()) if part]
        lines.append("<div>" + " ".join(map(to_mathml, parts)) + "</div>")
    return f'<div class="formula">{"".join(lines)}</div>'


def to_mathml(formula: str) -> str:
    """One formula as a `<math>` element."""
    inside = _Parser(formula).everything()
    text = html.escape(formula, quote=True)
    return f'<math displaystyle="true" alttext="{text}"><mrow>{inside}</mrow></math>'


def _tokens(formula):
    """(kind, text) of each token, with accents split off their letters."""
    for match in TOKEN.finditer(unicodedata.normalize("NFD", formula)):
        yield match.lastgroup, match.group()


class _Parser:
    def __init__(self, formula):
        self.tokens = list(_tokens(formula))
        self.at = 0

    # --- tokens -----------------------------------------------------------------------------

    def peek(self, skip_space=True):
        at = self.at
        while skip_space and at < len(self.tokens) and self.tokens[at][0] == "space":
            at += 1
        return self.tokens[at] if at < len(self.tokens) else ("end", "")

    def take(self, skip_space=True):
        while skip_space and self.at < len(self.tokens) and self.tokens[self.at][0] == "space":
            self.at += 1
        token = self.peek(False)
        self.at += 1
        return token

    # --- grammar ----------------------------------------------------------------------------

    def everything(self, closing=None):
        """Sums, separated by words, commas and relations, up to a closing bracket or the end."""
        parts = []
        while True:
            kind, text = self.peek()
            if kind == "end" or text == closing:
                return "".join(parts)
            if _is_word(kind, text):
                parts.append(self.words())
            elif self.starts_factor(closing):
                parts.append(self.product(closing))
            else:
                self.take()
                parts.append(_operator(text))

    def words(self):
        found = []
        while _is_word(*self.peek()):
            kind, text = self.take()
            if kind == "code":
                found.append(
                    f'</mtext><mtext class="name">{html.escape(text[1:-1])}</mtext><mtext>'
                )
            else:
                mark = self.take()[1] if self.peek()[1] in (",", ":") else ""
                found.append(text + mark)
        text = "\u2002" + "\u00a0".join(found) + "\u2002"
        return f"<mtext>{text}</mtext>".replace("<mtext></mtext>", "")

    def starts_factor(self, closing):
        kind, text = self.peek()
        if kind in ("number", "name"):
            return True
        if text in CLOSING:
            return text != closing
        return text in ("√", "Σ", "Π", "∞", "…")

    def product(self, closing):
        """Factors next to each other or joined by `·`; `/` makes a fraction of those before it."""
        made = [self.factor()]
        while True:
            kind, text = self.peek()
            if text == "/":
                self.take()
                above = "".join(_bare(made) if len(made) == 1 else [m for m, _ in made])
                below = "".join(_bare([self.factor()]))
                made = [(f"<mfrac><mrow>{above}</mrow><mrow>{below}</mrow></mfrac>", None)]
            elif text == "·":
                self.take()
                made.append(("<mo>·</mo>", None))
                made.append(self.factor())
            elif self.starts_factor(closing) and not _is_word(kind, text):
                made.append(self.factor())
            else:
                return "".join(m for m, _ in made)

    def factor(self):
        """(markup, the same without brackets or `None`) of an atom with its scripts."""
        markup, inside = self.atom()
        sub = sup = ""
        while True:
            kind, text = self.peek(skip_space=False)
            if kind == "accent":
                self.take()
                accent = f'<mo stretchy="false">{ACCENTS[text]}</mo>'
                markup = f'<mover accent="true">{markup}{accent}</mover>'
            elif kind == "sub":
                self.take()
                sub += _script(text.translate(SUBSCRIPTS))
            elif kind == "sup":
                self.take()
                sup += _script(text.translate(SUPERSCRIPTS))
            elif text == "∞":
                self.take()
                sub += "<mi>∞</mi>"
            elif text == "'":
                self.take()
                sup += "<mo>′</mo>"
            elif text == "*":
                self.take()
                sup += "<mo>*</mo>"
            elif text == "^":
                self.take()
                if self.peek()[1] == "−":
                    self.take()
                    sup += "<mo>−</mo>"
                sup += "".join(_bare([self.factor()]))
            else:
                break
        if sub and sup:
            return f"<msubsup>{markup}<mrow>{sub}</mrow><mrow>{sup}</mrow></msubsup>", None
        if sub:
            return f"<msub>{markup}<mrow>{sub}</mrow></msub>", None
        if sup:
            return f"<msup>{markup}<mrow>{sup}</mrow></msup>", None
        return markup, inside

    def atom(self):
        kind, text = self.take()
        if kind == "number":
            return (
                "<mfrac><mn>1</mn><mn>2</mn></mfrac>" if text == "½" else f"<mn>{text}</mn>"
            ), None
        if kind == "name":
            markup = self.name(text)
            if text in FUNCTIONS and self.peek(skip_space=False)[1] == "(":
                # A call binds tighter than a fraction or a root.
                markup = f"<mrow>{markup}{self.atom()[0]}</mrow>"
            return markup, None
        if text == "√":
            return f"<msqrt>{''.join(_bare([self.factor()]))}</msqrt>", None
        if text in CLOSING:
            inside = self.everything(CLOSING[text])
            self.take()
            fence = 'fence="true" stretchy="' + ("true" if "<mfrac" in inside else "false") + '"'
            left = f'<mo form="prefix" {fence}>{text}</mo>'
            right = f'<mo form="postfix" {fence}>{CLOSING[text]}</mo>'
            bare = inside if text == "(" else None
            return f"<mrow>{left}{inside}{right}</mrow>", bare
        return (f"<mo>{text}</mo>" if text in "ΣΠ" else f"<mi>{text}</mi>"), None

    def name(self, text):
        head, _, tail = text.partition("_")
        if tail and len(head) == 1:
            tail = _name(tail)
            return f"<msub><mi>{head}</mi>{tail}</msub>"
        if text in FUNCTIONS and self.peek(skip_space=False)[0] == "space":
            return f"<mi>{text}</mi><mspace width='0.17em'/>"
        return _name(text)


def _name(text):
    """Names of several letters are upright, and those of arguments look like code."""
    if "_" in text or (len(text) > 1 and text not in FUNCTIONS and text.isascii()):
        return f'<mtext class="name">{text}</mtext>'
    return f"<mi>{text}</mi>"


ARGUMENTS = {
    "exponent",
    "factor",
    "new",
    "old",
    "power",
    "root",
    "scale",
    "threshold",
    "timescale",
    "value",
}
"""Words that are names in a formula, although they are words."""


def _is_word(kind, text):
    if kind == "code":
        return True
    return (
        kind == "name"
        and len(text) > 1
        and text.isascii()
        and "_" not in text
        and text not in FUNCTIONS
        and text not in ARGUMENTS
    )


def _bare(factors):
    """The markup of factors, without the brackets that a fraction or a root makes superfluous."""
    return [markup if inside is None else inside for markup, inside in factors]


def _script(text):
    parts = re.findall(r"\d+|.", text)
    tags = ["mn" if p.isdigit() else "mo" if p in "+−" else "mi" for p in parts]
    return "".join(f"<{tag}>{p}</{tag}>" for tag, p in zip(tags, parts, strict=True))


def _operator(text):
    if text in ",:":
        return f'<mo separator="true">{text}</mo>'
    return f"<mo>{html.escape(text)}</mo>"
