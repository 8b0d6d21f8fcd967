"""Sphinx's settings for the course as a static site; `make_site.py` writes the pages they render.

Nothing comes from another host: formulas are MathML, widgets are what they showed last, and the
search index is a file of the site.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

project = "GPU Memory Lab"
author = "GPU Memory Lab contributors"
language = "en"

extensions = ["myst_nb", "offline"]
root_doc = "index"
exclude_patterns = ["downloads"]  # source notebooks, to be downloaded, not rendered

nb_execution_mode = "off"
nb_ipywidgets_js = {}  # its default comes from other hosts
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 4  # links between files name headings as GitHub does
suppress_warnings = [
    "myst.header",  # a page that includes another's table may skip a level
]

html_theme = "furo"
html_title = "GPU Memory Lab"
html_favicon = "static/icon.svg"
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/fit.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_show_search_summary = False  # it fetches pages, which browsers refuse to a file://
html_last_updated_fmt = "%Y-%m-%d"
html_domain_indices = html_use_index = False
