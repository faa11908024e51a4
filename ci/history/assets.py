"""asv's pages as the site has them: from this host alone, names as text, and the right way round for throughputs.

asv is patched by exact fragments; one that is not there ends the build, so that another asv cannot bring back what is mended here.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import asv

from ci.errors import UsageError

APP = "graphs.html"
"""asv's page; the front page is index.html."""
_WWW = Path(__file__).parent / "www"
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'"

_TEXT: dict[str, list[tuple[str, str]]] = {
    "asv_ui.js": [
        ("benchmark_basename, parameter_idx, revisions) {", "benchmark_basename, parameter_idx, revisions, faster) {"),
        ("color: '#d00'", "color: (faster ? '#1f8a46' : '#d00')"),
        ('color: "rgba(255,0,0,0.1)"', "color: (faster ? 'rgba(0,160,60,0.1)' : 'rgba(255,0,0,0.1)')"),
        ("""'<div class="panel-heading">' + heading + '</div>'""", """'<div class="panel-heading">' + asv_text(heading) + '</div>'"""),
        ("'graphs/summary/' + benchmark_basename + '.json'", "$.asv.graph_to_path(benchmark_basename, {summary: ''})"),
    ],
    "summarygrid.js": [
        ("""href="#' + bm.name +""", """href="#' + asv_text(encodeURIComponent(bm.name)) +"""),
        ("""id="summarygrid-' + bm.name + '\"""", """id="summarygrid-' + asv_text(bm.name) + '\""""),
        (
            """class="benchmark-text">' + display_name + '</div>'""",
            """class="benchmark-text">' + asv_text(display_name) + '<br><span class="direction">' + asv_text(bm.unit || '') + """
            """(bm.higher_is_better ? ', higher is better' : ', lower is better') + '</span></div>'""",
        ),
        ("title: bm.name,", "title: asv_text(bm.name),"),
        ("$('<h1>' + group + '</h1>')", "$('<h1/>').text(group)"),
        ("'graphs/summary/' + bm.name + '.json'", "$.asv.graph_to_path(bm.name, {summary: ''})"),
    ],
    "summarylist.js": [
        ("details.push(key + ': ' + val);", "details.push(asv_text(key + ': ' + val));"),
        ("row.pretty_name.match(/(.*)\\(.*$/)", "row.pretty_name.match(/^([^(]*)\\(/)"),
        (
            "row.name, row.idx, [row.change_rev]);",
            "row.name, row.idx, [row.change_rev], asv_faster(row.name, row.prev_value, row.last_value) > 0);",
        ),
        ("if (change > 5) {", "if (asv_faster(row.name, row.prev_value, row.last_value) < -0.01) {"),
        ("else if (change < -5) {", "else if (asv_faster(row.name, row.prev_value, row.last_value) > 0.01) {"),
    ],
    "graphdisplay.js": [
        ("""<b class="caret-right"/> ' + parts[j] +""", """<b class="caret-right"/> ' + asv_text(parts[j]) +"""),
        (
            """$('<li><a href="#' + bm_name + '">' + name + '</li>')""",
            """$('<li><a href="#' + asv_text(encodeURIComponent(bm_name)) + '">' + asv_text(name) + '</li>')""",
        ),
        ("details.push(key + ': ' + val);", "details.push(asv_text(key + ': ' + val));"),
        ('font-size:smaller;\'>" + tag + "</div>"', 'font-size:smaller;\'>" + asv_text(tag) + "</div>"'),
        (
            "options.yaxis.axisLabel = unit_name;",
            "options.yaxis.axisLabel = unit_name + ($.asv.main_json.benchmarks[current_benchmark].higher_is_better ?"
            " ' (higher is better)' : ' (lower is better)');",
        ),
        (
            "{ color: '#d00', lineWidth: 2, xaxis: { from: x, to: x } }",
            "{ color: asv_colour(current_benchmark, graphs, x), lineWidth: 2, xaxis: { from: x, to: x } }",
        ),
        ('color: "rgba(200, 0, 0, 0.2)"', 'color: "rgba(120, 120, 120, 0.2)"'),
        ("return (v / multiplier).toPrecision(3);", "return Number((v / multiplier).toPrecision(3)).toLocaleString('en');"),
    ],
    "regressions.js": [
        ("benchmark_name.replace(/\\([\\s\\S]*/, '')", "item[7]"),
        ("benchmark_name.replace(/\\(.*/, '')", "item[7]"),
        (
            "var factor = new_value / old_value;",
            "var factor = benchmark.higher_is_better ? old_value / new_value : new_value / old_value;",
        ),
        (
            "var factor = last_value / best_value;",
            "var factor = benchmark.higher_is_better ? best_value / last_value : last_value / best_value;",
        ),
        ("$('<td/>').text(factor.toFixed(2) + 'x')", "$('<td class=\"regressed\"/>').text(factor.toFixed(3) + 'x slower')"),
        ("factor_td.text(factor.toFixed(2) + 'x');", "factor_td.addClass('regressed').text(factor.toFixed(3) + 'x slower');"),
    ],
    "asv.js": [
        ("info.params['benchmark'] = info.location[0];", "info.params['benchmark'] = info.location.join('/');"),
        ("var str = '#' + info['location'];", "var str = '#' + encodeURIComponent(info['location']);"),
        (
            """'' + x.toPrecision(3) + ' ' + unit;""",
            """Number(x.toPrecision(4)).toLocaleString('en', {maximumSignificantDigits: 4}) + ' ' + unit;""",
        ),
        ('document.title = "airspeed velocity of an unladen " + index.project;', 'document.title = index.project + " benchmarks";'),
        ('project_name.setAttribute("href", index.project_url);', "project_name.setAttribute('href', 'index.html');"),
    ],
}
"""Fragments of asv 0.6.6 and what stands in their place; each occurs at least once."""

_SCRIPTS = {
    "jquery-3.3.1.min.js": "jquery.min.js",
    "jquery.flot.min.js": "jquery.flot.js",
    "jquery.flot.time.min.js": "jquery.flot.time.js",
    "jquery.flot.selection.min.js": "jquery.flot.selection.js",
    "jquery.flot.categories.min.js": "jquery.flot.categories.js",
}


def write(target: Path) -> None:
    """Writes asv's page, scripts and styles into `target`.

    Raises:
        UsageError: The installed asv is not the one that the patches are for.
    """
    source = Path(asv.__file__).parent / "www"
    for path in sorted(source.iterdir()):
        if path.name in ("index.html", "error.html"):
            continue
        if path.name in _TEXT:
            _put(target / path.name, _patched(path.name, path.read_text(encoding="utf-8"), _TEXT[path.name]))
        else:
            shutil.copyfile(path, target / path.name)
    for name in ("safe.js", "site.css"):
        shutil.copyfile(_WWW / name, target / name)
    (target / "vendor").mkdir(exist_ok=True)
    for path in sorted((_WWW / "vendor").iterdir()):
        text = path.read_text(encoding="utf-8")
        # What would be asked for besides: maps of minified files, and a font of icons.
        text = re.sub(r"^//# sourceMappingURL=.*$", "", text, flags=re.MULTILINE)
        _put(target / "vendor" / path.name, re.sub(r"@font-face\{[^}]*\}", "", text) if path.suffix == ".css" else text)
    _put(target / APP, _page((source / "index.html").read_text(encoding="utf-8")))


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _patched(name: str, text: str, changes: list[tuple[str, str]]) -> str:
    for old, new in changes:
        if old not in text:
            raise UsageError(f"asv's {name} has no {old!r} any more: install asv 0.6.6, or mend ci/history/assets.py for this version.")
        text = text.replace(old, new)
    return text


def _page(text: str) -> str:
    """asv's index.html without a request to elsewhere and without inline script."""

    def local(found: re.Match[str]) -> str:
        name = found[2].rsplit("/", 1)[1]
        name = _SCRIPTS.get(name, name)
        if not (_WWW / "vendor" / name).is_file():
            raise UsageError(f"asv's page loads {found[2]}, which is not among ci/history/www/vendor: install asv 0.6.6, or add the file.")
        return f'{found[1]}="vendor/{name}"'

    text = re.sub(r"<script type=\"text/javascript\">.*?</script>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(
        r'(src|href)="(https://[^"]+\.(?:js|css))"(?: integrity="[^"]*")?(?: crossorigin="[^"]*")?(?: referrerpolicy="[^"]*")?', local, text
    )
    text = text.replace(' onerror="js_load_failure()"', "")
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '    <meta name="viewport" content="width=device-width, initial-scale=1">\n    <script src="safe.js"></script>\n'
    )
    return _patched(
        "index.html",
        text,
        [
            ("<html>", '<html lang="en">'),
            ('<meta http-equiv="Content-Type" content="text/html; charset=utf-8">', f'<meta charset="utf-8">\n    {head}'),
            ("<title>airspeed velocity</title>", "<title>benchmarks</title>"),
            ('<link rel="shortcut icon"', '<link href="site.css" rel="stylesheet" type="text/css"/>\n    <link rel="shortcut icon"'),
            ('<li id="nav-li-" class="active">', '<li><a href="index.html">Overview</a></li>\n\t<li id="nav-li-" class="active">'),
            (
                '<a id="project-name" href="#" class="navbar-link" target="_blank">',
                '<a id="project-name" href="index.html" class="navbar-link">',
            ),
        ],
    )
