"""HTML that runs or fetches something where it is shown as it is."""

ATTACKS = r"""
<svg><style><img src=x onerror=hit=1></style></svg>
%%
<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=hit=1&gt;">
%%
<noscript><p title="</noscript><img src=x onerror=hit=1>">
%%
<template><img src=x onerror=hit=1></template>
%%
<!--><img src=x onerror=hit=1>-->
%%
<![CDATA[><img src=x onerror=hit=1>]]>
%%
<svg><a xlink:href="javascript:hit=1"><text>x</text></a><animate attributeName=href values=javascript:hit=1 /></svg>
%%
<svg><use href="https://x.org/a.svg#a"/></svg><svg><image href="https://x.org/i.png" width=9 height=9 /></svg>
%%
<input type=image src=https://x.org/a.png><button formaction=https://x.org>x</button>
%%
<p style="background:u\72l(https://x.org/c.png)">x</p>
%%
<p style="background:url(data:x),url/**/(https://x.org/z.png),url('https://x.org/y)">x</p>
%%
<style>@\69mport 'https://x.org/e.css'; a{}</style>
%%
<iframe srcdoc="<script>parent.hit=1</script>"></iframe>
%%
<a ping=https://x.org href=#>x</a><a href="data:text/html,<script>hit=1</script>">y</a>
%%
<form><math><mtext></form><form><mglyph><svg><mtext><style><path id="</style><img onerror=hit=1 src>">
%%
<audio src=https://x.org/a.mp3></audio><video><source src=https://x.org/a.mp4><track src=https://x.org/t.vtt></video><picture><source srcset=https://x.org/p.png><img src=data:,></picture>
%%
<table background=https://x.org/t.png><td background=https://x.org/td.png>x</table><body background=https://x.org/b.png>
%%
<svg><filter id=f><feImage href="https://x.org/fe.png"/></filter><rect filter="url(https://x.org/f.svg#f)" fill="url(https://x.org/g.svg#g)" width=9 height=9 /></svg>
%%
<math><annotation-xml encoding="text/html"><img src=x onerror=hit=1></annotation-xml></math>
%%
<img src="data:image/png;base64,AAAA" srcset="https://x.org/set.png 2x" imagesrcset="https://x.org/s2.png">
%%
<details open ontoggle=hit=1><summary>x</summary></details>
%%
<plaintext><script>hit=1</script>
%%
<select><style></select><img src=x onerror=hit=1></style></select>
""".strip().split("\n%%\n")  # noqa: E501
#: A picture in the page itself, whose own script no browser runs.
WITNESS = (
    '<img src=\'data:image/svg+xml,<svg xmlns="http://www.w3.org/2000/svg" onload="hit=1"/>\'>'
)
