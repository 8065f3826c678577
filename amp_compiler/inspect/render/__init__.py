"""A graph or a report as something to look at: one file a form. All of them read ``amp_compiler.ir.view`` and
``amp_compiler.inspect.report``; the CLI and ``report()`` use the same ones."""
