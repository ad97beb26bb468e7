"""What the page makes of text: Markdown that keeps every token, and Prometheus's format."""

from __future__ import annotations

import json
import random
from typing import Any

MARKDOWN = {
    "*a* _b_ **c** ~~d~~ ***e***": "<p><em>a</em> <em>b</em> <strong>c</strong> <del>d</del> ",
    "snake_case_name 2 * 3 * 4": "<p>snake_case_name 2 * 3 * 4</p>",
    "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
    "[x](JaVaScRiPt:alert)": "<p>[x](JaVaScRiPt:alert)</p>",
    "![pic](https://a.b/c.png)": '<p><a href="https://a.b/c.png"',
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "1. a\n2. b\n   - c": '<ol start="1"><li>a</li><li>b<ul><li>c</li></ul></li></ol>',
    "> q\n> r\n\ns": "<blockquote><p>q\nr</p></blockquote><p>s</p>",
    "|a|b|\n|-|-|\n|1|2|": "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td>",
    "```\nx\n": "<code>x\n</code>",
    "``a`b``": "<code>a`b</code>",
    r"\*no\*": "<p>*no*</p>",
    "---": "<hr>",
}
RENDER = """async ([text, entries]) => {
  const { render } = await import("/page/render.js");
  const { TokenText } = await import("/page/sources.js");
  const parent = document.createElement("div");
  const tokens = new TokenText(entries ?? []);
  render(parent, text, tokens, entries ? 0 : -1);
  for (const node of parent.querySelectorAll("[data-key]")) node.removeAttribute("data-key");
  const spans = [...parent.querySelectorAll(".token")].map((one) => [one.className, one.textContent]);
  return [parent.innerHTML, spans, parent.textContent];
}"""


def test_markdown(page: Any) -> None:
    for text, expected in MARKDOWN.items():
        html, _, _ = page.evaluate(RENDER, [text, None])
        assert expected in html, (text, html)


def test_every_character_keeps_its_token_in_any_markdown(page: Any) -> None:
    """Every source writes letters of its own, so what carries its tint can be read off."""
    letters = {"lookup": "a", "mtp": "b", "model": "c"}
    marks = ("*", "**", "_", "`", "\n", "\n\n", "- ", "> ", "# ", "| ", "|-|\n", "[", "](http://x.y)", "<")
    source = random.Random(4)
    for _ in range(150):
        entries = []
        for _ in range(source.randrange(1, 40)):
            name, letter = source.choice(list(letters.items()))
            texts = [letter * source.randrange(1, 4), letter + " ", source.choice(marks)]
            entries.append({"text": source.choice(texts), "source": name})
        text = "".join(one["text"] for one in entries)
        if "```" in text:  # what stands beside it is the name of a language, not text
            continue
        _, spans, whole = page.evaluate(RENDER, [text, entries])
        for style, shown in spans:
            assert set(shown) & set("abc") <= {letters[style.rpartition("-")[2]]}, (text, style, shown)
        for letter in "abc":  # nothing is lost, doubled, or without its token
            assert whole.count(letter) == text.count(letter), text
            assert whole.count(letter) == sum(shown.count(letter) for _, shown in spans), text


def test_prometheus_text_is_read(page: Any) -> None:
    text = '# HELP x y\nx_total{model_name="a\\"b",source="lookup"} 3.0\nx_total{source="mtp"} 1e2\n'
    text += "y +Inf\nbad\n"
    got = page.evaluate(
        'async (text) => { const { parseMetrics } = await import("/page/metrics.js");'
        "return JSON.stringify([...parseMetrics(text)], (k, v) => v === Infinity ? 'inf' : v); }",
        text,
    )
    assert json.loads(got) == [
        ["x_total", [{"labels": {"model_name": 'a"b', "source": "lookup"}, "value": 3},
                     {"labels": {"source": "mtp"}, "value": 100}]],
        ["y", [{"labels": {}, "value": "inf"}]],
    ]  # fmt: skip
