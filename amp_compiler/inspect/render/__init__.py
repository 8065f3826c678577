"""Renderers for graphs and reports, one file per format. All of them read ``amp_compiler.ir.view`` and
``amp_compiler.inspect.data``; the CLI and ``report()`` share them."""
