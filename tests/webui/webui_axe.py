"""A check of a part of a page with axe-core, for accessibility by WCAG's levels A and AA."""
from __future__ import annotations

from importlib.resources import files
from typing import Any

LEVELS = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
CONTRAST = {"type": "rule", "values": ["color-contrast"]}
# axe cannot measure the contrast of a placeholder, of text on a gradient, or of text below another element. So a field
# gets its placeholder's colour, a gradient becomes one of its two end colours (its first, then its last), and elements
# that lie over text are hidden in the second pass. Nor can axe measure a text of several lines in a fixed box that lies
# over several elements, so such a box has an element for each line.
PREPARE = """
const [root, end] = arguments;
for (const at of [root, ...root.querySelectorAll('*')]) {
  const ends = at.dataset.ends || (getComputedStyle(at).backgroundImage.match(/rgba?\\([^)]*\\)/g) || []).join(';');
  if (ends) { at.dataset.ends = ends; at.style.background = ends.split(';').at(end); }
  if (at.placeholder && !at.value) at.style.color = getComputedStyle(at, '::placeholder').color;
  if (at.matches('.onediff-title, .onediff-settings-apply')) at.style.visibility = end ? 'hidden' : '';
}
"""
RESTORE = """
const [root] = arguments;
for (const at of [root, ...root.querySelectorAll('[data-ends]')]) { at.style.background = ''; delete at.dataset.ends; }
for (const at of root.querySelectorAll('.onediff-title, .onediff-settings-apply')) at.style.visibility = '';
"""
# The elements for the second pass: those with a gradient, and those whose contrast axe could not measure.
AGAIN = """
const [root] = arguments;
return [root, ...root.querySelectorAll('*')].filter(at => at.dataset.ends || window.onediffUndecided.includes(at));
"""
RUN = """
const [roots, only, done] = arguments;
window.onediffUndecided = [];
const told = (rules) => rules.flatMap(rule => rule.nodes.map(({html, any, all, none}) =>
  `${rule.id}: ${html.slice(0, 120)} ${[...any, ...all, ...none].map(check => check.message).join('; ')}`));
// A text that a scrolling box cuts is measured on the wide page, which has room for all of it.
const cut = ({target}) => {
  const box = document.querySelector(target[0])?.closest('.onediff-table, .onediff-numbers');
  return box && box.scrollWidth > box.clientWidth;
};
const isContrast = ({id}) => id === 'color-contrast';
const undecided = (rule) => ({...rule, nodes: isContrast(rule) ? rule.nodes.filter(node => !cut(node)) : []});
// Without preload, because axe would fetch the style sheets again, and no rule of these levels reads them.
const options = {runOnly: only, preload: false, elementRef: true};
axe.run({include: roots}, options).then(({violations, incomplete, passes}) => {
  window.onediffUndecided = incomplete.flatMap(rule => rule.nodes).map(node => node.element);
  done({
    violations: told(violations),
    // Left out: an arrow that is drawn with a letter, and a tab, whose background gradio 6 underlines.
    undecided: told(incomplete.map(undecided)).filter(text => !/non-text|role="tab"/.test(text)),
    texts: passes.filter(rule => rule.id === 'color-contrast').flatMap(rule => rule.nodes).length,
  });
}).catch(error => done({violations: [String(error)], undecided: [], texts: 0}));
"""


def violations(page: Any, selector: str, least: int, rules: dict[str, Any] = LEVELS) -> list[str]:
    """The violations that axe finds inside an element, and the texts whose contrast it cannot measure.

    least: the least number of texts. Fewer are a violation, too, because the element was not shown. rules: LEVELS or
    CONTRAST.
    """
    if not page.run("return 'axe' in window"):
        page.run(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8") + "\n;return null;")
    root = page.driver.find_element("css selector", selector)
    page.run(PREPARE, root, 0)
    answers = [page.driver.execute_async_script(RUN, [root], rules)]
    again = page.run(AGAIN, root)
    if again:
        page.run(PREPARE, root, -1)
        answers.append(page.driver.execute_async_script(RUN, again, CONTRAST))
    page.run(RESTORE, root)
    undecided = set.intersection(*(set(answer["undecided"]) for answer in answers))
    wrong = sorted({text for answer in answers for text in answer["violations"]} | undecided)
    texts = answers[0]["texts"]
    return wrong if wrong or texts >= least else [f"axe found {texts} texts"]
