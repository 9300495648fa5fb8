"""The SQLite file under the memory: opening, journal mode, transactions, and clear errors.

WAL where it works, the rollback journal on network file systems (WAL needs shared memory).
Writers take the lock at once (BEGIN IMMEDIATE) and wait for one another; nothing is written by
opening a store that is up to date.
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from specpilot.errors import Conflict, InvalidInput, SpecPilotError, Unsupported

__all__ = ["SCHEMA_VERSION", "TOKENIZER", "Database"]

SCHEMA_VERSION: Final = 1
_BUSY_MS: Final = 15_000
_NETWORK: Final = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "lustre", "gpfs",
                   "fuse.sshfs", "ceph", "beegfs"}  # fmt: skip

TOKENIZER: Final = "\"porter unicode61 tokenchars '_'\""
"""How the full-text index splits text: English stems, underscores inside words."""

_SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE revisions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL, revision INTEGER NOT NULL, body TEXT NOT NULL, sha256 TEXT NOT NULL,
    UNIQUE (id, revision));
CREATE TRIGGER revisions_stay BEFORE UPDATE ON revisions
    BEGIN SELECT RAISE(ABORT, 'revisions are append-only'); END;
CREATE TRIGGER revisions_remain BEFORE DELETE ON revisions
    BEGIN SELECT RAISE(ABORT, 'revisions are append-only'); END;
CREATE TABLE heads (
    row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, revision INTEGER NOT NULL,
    seq INTEGER NOT NULL, card TEXT NOT NULL);
CREATE INDEX heads_seq ON heads (seq);
CREATE TABLE links (
    source TEXT NOT NULL, relation TEXT NOT NULL, other TEXT NOT NULL,
    PRIMARY KEY (source, relation, other)) WITHOUT ROWID;
CREATE INDEX links_other ON links (other);
CREATE TABLE seeds (id TEXT PRIMARY KEY, sha256 TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE embeddings (
    model TEXT NOT NULL, text_sha256 TEXT NOT NULL, vector BLOB NOT NULL,
    PRIMARY KEY (model, text_sha256)) WITHOUT ROWID;
CREATE VIRTUAL TABLE fts USING fts5(
    title, claim, body, tags, tokenize = {tokenizer});
"""


class Database:
    """One SQLite connection that threads of a process share under a lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._depth = 0
        if path.is_dir():
            raise InvalidInput(f"{path} is a directory.", hint="Name the memory's SQLite file.")
        with self.errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False
            )
        try:
            with self.errors():
                self._open()
        except SpecPilotError:
            self._connection.close()
            raise

    def _open(self) -> None:
        run = self._connection.execute
        run(f"PRAGMA busy_timeout = {_BUSY_MS}")
        version = self._version()
        if version is None:
            self.journal_mode = self._choose_journal()
            with self.write():
                if self._version() is None:
                    for statement in _statements(_SCHEMA.replace("{tokenizer}", TOKENIZER)):
                        run(statement)
                    run("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
        elif version > SCHEMA_VERSION:
            raise Unsupported(
                f"{self.path} was written by a newer SpecPilot (memory schema {version}; this one "
                f"knows {SCHEMA_VERSION}).",
                hint="Update SpecPilot, or export from the newer one and import here.",
            )
        self.journal_mode = str(run("PRAGMA journal_mode").fetchone()[0])
        run("PRAGMA synchronous = FULL")
        run("PRAGMA temp_store = MEMORY")
        run("CREATE VIRTUAL TABLE temp.fts_terms USING fts5vocab('main', 'fts', 'row')")

    def _version(self) -> int | None:
        run = self._connection.execute
        names = {row[0] for row in run("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "meta" not in names:
            if names:
                raise InvalidInput(
                    f"{self.path} is an SQLite file, but no SpecPilot memory (tables: "
                    f"{', '.join(sorted(names)[:5])}).",
                    hint="Name another file; this one was left as it is.",
                )
            return None
        row = run("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        if row is None or not str(row[0]).isdigit():
            raise InvalidInput(f"{self.path} has no readable schema version.")
        return int(row[0])

    def _choose_journal(self) -> str:
        if _filesystem(self.path) in _NETWORK:
            return "delete"
        try:
            return str(self._connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        except sqlite3.OperationalError as error:
            if "lock" in str(error) or "busy" in str(error):
                raise
            return "delete"

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection for reading."""
        with self._lock, self.errors():
            yield self._connection

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction that holds the write lock from its start; undone by any exception.

        Inside another one it is a savepoint: an exception undoes the inner part only.
        """
        with self._lock, self.errors():
            inner = f"level{self._depth}"
            run = self._connection.execute
            run(f"SAVEPOINT {inner}" if self._depth else "BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield self._connection
                if self._depth == 1:
                    run("COMMIT")
                else:
                    run(f"RELEASE {inner}")
            except BaseException:
                # A full disk may have rolled the whole transaction back already.
                if self._connection.in_transaction:
                    run(f"ROLLBACK TO {inner}" if self._depth > 1 else "ROLLBACK")
                raise
            finally:
                self._depth -= 1

    def data_version(self) -> int:
        """Return a number that changes when another connection has committed."""
        with self.read() as connection:
            return int(connection.execute("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate what SQLite and the file system say into our errors."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise _translate(error, self.path) from error


def _translate(error: Exception, path: Path) -> SpecPilotError:
    text = str(error)
    low = text.lower()
    if "locked" in low or "busy" in low:
        return Conflict(
            f"The memory {path} is locked by another writer for {_BUSY_MS // 1000} s.",
            hint="Try again; find the process that holds it if this stays.",
        )
    if "disk is full" in low or "no space left" in low:
        return Unsupported(
            f"The disk that holds {path} is full; nothing was written.",
            hint="Free some space and repeat the call.",
        )
    if "readonly" in low or "read-only" in low or "permission" in low or "unable to open" in low:
        return Unsupported(
            f"The memory {path} cannot be written or opened here ({text}).",
            hint="Make the directory writable, or set SPECPILOT_HOME to one that is.",
        )
    if "not a database" in low or "malformed" in low:
        return InvalidInput(
            f"{path} is no readable SQLite file ({text}).",
            hint="Restore it from an export, or name another file; it was left as it is.",
        )
    return Unsupported(f"The memory {path} failed: {text}.")


def _statements(script: str) -> Iterator[str]:
    pending = ""
    for line in script.strip().splitlines():
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""


def _filesystem(path: Path) -> str:
    """Return the type of the file system that holds a path, as Linux names it; '' elsewhere."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    target = str(path.parent.resolve())
    best = ("", "")
    for line in mounts.splitlines():
        _, mount, kind, *_ = line.split(" ")
        inside = mount == "/" or target == mount or target.startswith(mount + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]
