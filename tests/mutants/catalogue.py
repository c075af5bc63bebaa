"""The faults: substitutions of text, each of which must match exactly once, so that none is lost in a refactoring.

Left out are those behind which another check stands, such as a patch for another base (its root is compared after it
was applied): no promise breaks where one of two locks is open.
"""

from __future__ import annotations

from .mutant import Mutant, one
from .ranks import RANKS

PUBLISHER = [
    Mutant(
        "payloads are stored after the commit",
        "sync.publisher",
        (
            (
                "            draft = make_draft(self._baseline,",
                "            held: list = []\n"
                "            self._stream.put_payload = lambda payload, kind, data: held.append(\n"
                "                (payload, kind, data if isinstance(data, bytes) else b''.join(data)))\n"
                "            draft = make_draft(self._baseline,",
            ),
            (
                '                timer.end("commit")\n',
                "                for late in held:\n                    Stream.put_payload(self._stream, *late)\n",
            ),
        ),
    ),
    Mutant(
        "the baseline moves before the commit",
        "sync.publisher",
        (
            (
                "            try:\n                committed = self._committer.commit(",
                "            pending.draft.take_effect(self._baseline, pending.manifest, pending.history)\n"
                "            try:\n                committed = self._committer.commit(",
            ),
            (
                "                pending.draft.take_effect(self._baseline, pending.manifest, pending.history)\n",
                "                pass\n",
            ),
        ),
    ),
    one(
        "a lost reply to a commit is taken for a refusal",
        "store.base",
        "        return store.get(name) == data\n",
        "        return False\n",
    ),
    one(
        "any commit of the version is taken for the own one",
        "store.base",
        "        return store.get(name) == data\n",
        "        return True\n",
    ),
    one("epochs are not looked at before a commit", "sync.commit", "        if newer:\n", "        if False:\n"),
    one(
        "an epoch that is taken is claimed again",
        "stream.claims",
        "            if create_or_confirm(self._store, self._names.epoch(epoch), claim.to_bytes(self._signer)):\n",
        "            create_or_confirm(self._store, self._names.epoch(epoch), claim.to_bytes(self._signer))\n"
        "            if True:\n",
    ),
    one(
        "a new publisher takes the epoch of the last",
        "stream.claims",
        "            epoch = first_free(listed, max(newest.epoch if newest else 0, above))\n",
        "            return max(listed, default=1)\n",
    ),
    one(
        "what is pending is committed though its payloads are gone",
        "sync.commit",
        "return fresh and not newer and self._stream.stores(manifest)",
        "return True",
    ),
    one(
        "a baseline is kept when its version was taken",
        "sync.publisher",
        "baseline.version == committer.version and not",
        "not",
    ),
    one(
        "resuming believes that the trainer has the head",
        "sync.resume",
        "        if digest.root == head.root:\n",
        "        if True:\n",
    ),
    one(
        "the baseline stays where it was",
        "sync.host_state",
        "        undo = advance_state(built, at.state, threads=self.threads)\n",
        "        undo = {}\n",
    ),
    one(
        "a commit's version is one too low",
        "sync.commit",
        "        self.head, self.next = manifest, manifest.version + 1\n",
        "        self.head, self.next = manifest, manifest.version\n",
    ),
    one(
        "no anchor comes with a changed set of tensors",
        "sync.upload",
        "    if patch and not with_anchor:\n        return Uploaded(patch, None)\n",
        "    if not with_anchor and draft.state.elements:\n        return Uploaded(patch, AnchorRef(()))\n",
    ),
]

FOLDS = [
    one(
        "a fold is made from too late a base",
        "sync.folds",
        "            log.record(undo)\n",
        "            log.base or log.record(undo)\n",
    ),
    one(
        "folds are not dropped when the state was replaced",
        "sync.folds",
        "        self._logs.clear()\n",
        "        pass\n",
    ),
    one(
        "of two changes the later one is undone",
        "patch.undo",
        "    unique, first = np.unique(positions, return_index=True)\n",
        "    unique, first = np.unique(positions[::-1], return_index=True)\n    first = len(positions) - 1 - first\n",
    ),
]

STATE = [
    one(
        "the root is not compared after an apply",
        "patch.apply",
        "        if target.root != header.target_root:\n",
        "        if False:\n",
    ),
    one(
        "a failed apply is not undone",
        "patch.apply",
        "        for index, undo in journal.items():\n",
        "        for index, undo in ():\n",
    ),
    one(
        "a link need not lead to its manifest's root",
        "sync.catch_up",
        "    if patch.header.target_root != manifest.root:\n",
        "    if False:\n",
    ),
    one(
        "an anchor's root is not compared",
        "stream.anchor",
        "    if tree.root != root:\n",
        "    if False:\n",
    ),
    one(
        "a payload is not hashed",
        "stream.stream",
        "                if sha256(data).hexdigest() == payload.sha256:\n",
        "                if True:\n",
    ),
    one(
        "an interrupted apply is taken for a whole one",
        "sync.host_state",
        "        self.poisoned = True\n        try:\n",
        "        try:\n",
    ),
    one(
        "poisoned ends without a hash",
        "sync.host_state",
        "state_digest(at.state, threads=self.threads).leaves != at.digest.leaves",
        "False",
    ),
    one(
        "an update's values are overwritten while they are read",
        "sync.host_state",
        "        if any(ref() is not None for ref in self._pinned):\n",
        "        if False:\n",
    ),
    one(
        "a state goes back to an anchor on its way",
        "sync.catch_up",
        "        if host.version is not None and path[0].base is None:\n",
        "        if False:\n",
        survives="only where a path from an older anchor breaks half-way is there a moment to see it",
    ),
    one(
        "a broken link is not avoided",
        "sync.route",
        "        self._avoided[planned.key] = self._avoided[link.key] = ",
        "        _ = ",
    ),
    one(
        "an unavailable store is a broken link",
        "sync.route",
        "BROKEN_LINK = (NotFound,",
        "BROKEN_LINK = (*NotFound.__bases__,",
    ),
]

DELIVERY = [
    one(
        "an update counts as taken over before it is",
        "sync.subscriber",
        "        if last and (taken or silent):\n",
        "        if last:\n",
    ),
    one(
        "an interrupted call's update is not delivered again",
        "sync.subscriber",
        "            self._in_doubt = True  # an",
        "            self._in_doubt = False  # an",
    ),
    one(
        "changes of steps between are lost",
        "sync.delivery",
        "(*self.pending, changes)",
        "(changes,)",
    ),
    one(
        "changes across an anchor are lost",
        "sync.delivery",
        "pending=(*self.pending, difference(old, new))",
        "pending=(difference(old, new),)",
    ),
    one(
        "old bits are delivered where an element changed twice",
        "patch.changes",
        "        whole[name] = TensorChanges.at(indices, state.read(name)[indices])\n",
        "        whole[name] = next(step[name] for step in steps if name in step)\n",
    ),
    one(
        "a base is believed to be the newest version",
        "sync.subscriber",
        "            if manifest.root == digest.root:\n",
        "            if True:\n",
    ),
]

TRUST = [
    one(
        "a manifest's digest is not checked",
        "stream.manifest",
        "    if manifest.digest != manifest.own_digest():\n",
        "    if False:\n",
    ),
    one(
        "a manifest may stand under another name",
        "stream.manifest",
        "    if (manifest.stream, manifest.version) != (stream, version):\n",
        "    if False:\n",
    ),
    one(
        "a manifest's signature is not checked",
        "stream.stream",
        "            self._trusted.check(manifest)\n",
        "            pass\n",
    ),
    one(
        "any key's signature will do",
        "stream.signing",
        "        key = self._keys.get(signature.key)\n",
        "        key = _public_key(signature.key)\n",
    ),
    one(
        "a signature need not be of the message",
        "stream.signing",
        "            key.verify(bytes.fromhex(signature.value), message)\n",
        "            bytes.fromhex(signature.value)\n",
    ),
    one(
        "what was remembered stays where a fold was followed",
        "sync.host_state",
        "        span = link.version - link.base if link.is_fold else 1\n",
        "        span = 1\n",
    ),
    one(
        "an anchor does not begin anew",
        "sync.publisher",
        "                History() if uploaded.anchor else draft",
        "                draft",
    ),
    one(
        "another run's versions are taken for ours",
        "stream.stream",
        "        if not self._is_ours(manifest):\n",
        "        if False:\n",
    ),
    one(
        "what lies above is the head, readable or not",
        "stream.doubts",
        "        except UNREADABLE as error:\n",
        "        except KeyError as error:\n",
    ),
    one(
        "what was refused once is never looked at again",
        "stream.doubts",
        "        for number in numbers[:at]:\n",
        "        for number in ():\n",
    ),
    one(
        "a claim need not be signed",
        "stream.statements",
        "    if trusted:\n        trusted.check_message(claim._message",
        "    if False:\n        trusted.check_message(claim._message",
    ),
    one(
        "a cached payload is not hashed",
        "store.cached",
        "            if self._hash(name) != digest:\n",
        "            if False:\n",
    ),
]

UPKEEP = [
    one(
        "gc deletes manifests from the oldest up",
        "maintenance.gc",
        "sorted(old, reverse=True)",
        "sorted(old)",
    ),
    one(
        "gc ignores the grace",
        "maintenance.gc",
        "digest not in named and info.modified < before]",
        "digest not in named]",
    ),
    one(
        "gc deletes payloads first",
        "maintenance.gc",
        "    doomed = [*links, *sorted(old, reverse=True), *unnamed, *trees]\n",
        "    doomed = [*unnamed, *sorted(old, reverse=True), *links]\n",
    ),
    one(
        "gc keeps no base of a kept version",
        "maintenance.gc",
        "            needed |= {manifest.version} | _bases(manifest, stored)\n",
        "            needed |= {manifest.version}\n",
    ),
    one(
        "gc does not look whether anchors are stored",
        "maintenance.gc",
        "    if manifest.anchor and stored.payloads.issuperset(manifest.anchor.shards):\n",
        "    if manifest.anchor:\n",
        survives="the loss shows only where gc comes between the damage to an anchor and the next one",
    ),
]

CALLERS = [
    one(
        "two threads are let in",
        "_util.serial",
        '        if self._callers.setdefault("caller", me) != me:\n',
        "        if False:\n",
    ),
    one(
        "a forked process is let in",
        "_util.serial",
        "        if os.getpid() != self._process:\n",
        "        if False:\n",
    ),
    one(
        "an interrupted operation goes on alone",
        "_util.serial",
        "                    operation.stop()\n                raise\n",
        "                    pass\n                raise\n",
    ),
    one(
        "an interrupted caller is held for good",
        "_util.serial",
        '            return operation.result()\n        finally:\n            self._callers.pop("caller", None)\n',
        "            return operation.result()\n        finally:\n            pass\n",
    ),
]

GROUP = [
    one(
        "a group switches before all have staged",
        "sync.group",
        "    all_hold = all(note.version == version for note in others)\n",
        "    all_hold = True\n",
    ),
]

MUTANTS = [*PUBLISHER, *FOLDS, *STATE, *DELIVERY, *TRUST, *UPKEEP, *CALLERS, *GROUP, *RANKS]
