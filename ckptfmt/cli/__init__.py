"""The tool: ``ckptfmt VERB``. One thin file per verb; what a verb asks and prints stands in a room of its noun."""
