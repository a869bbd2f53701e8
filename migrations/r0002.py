"""Revision 0002, frozen: a migration says what it did, whatever the schema becomes later."""

from __future__ import annotations

from typing import Final

SQLITE: Final[tuple[str, ...]] = (
    r"""
CREATE TABLE messages (
  launch_id INTEGER NOT NULL,
  topic TEXT NOT NULL,
  rank INTEGER NOT NULL,
  body JSON NOT NULL,
  at VARCHAR(26) NOT NULL,
  CONSTRAINT pk_messages PRIMARY KEY (launch_id, topic, rank),
  CONSTRAINT fk_messages_launch_id_launches FOREIGN KEY(launch_id) REFERENCES launches (id)
)
""",
)

POSTGRESQL: Final[tuple[str, ...]] = (
    r"""
CREATE TABLE messages (
  launch_id BIGINT NOT NULL,
  topic TEXT NOT NULL,
  rank BIGINT NOT NULL,
  body JSONB NOT NULL,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  CONSTRAINT pk_messages PRIMARY KEY (launch_id, topic, rank),
  CONSTRAINT fk_messages_launch_id_launches FOREIGN KEY(launch_id) REFERENCES launches (id)
)
""",
)
