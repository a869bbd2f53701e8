"""The commit protocol as a model that can be explored exhaustively (spec/protocol-model.md)."""
