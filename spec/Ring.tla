------------------------------- MODULE Ring -------------------------------
(* How the ranks of one instance agree: one ordered log, one store topic      *)
(* (bootstrap), two-pass ring votes (transfer and release share the one       *)
(* ballot), aborts, a crash of the whole instance and its next epoch.         *)
(*                                                                            *)
(* What a remote engine does is the environment: `port[k][r]` is rank k's end *)
(* of the hand-over of request r. What each rank decided is `state[k][r]` and *)
(* `held[k][r]` (its pages have not gone back to the pool). The invariants    *)
(* speak about both. README.md says what is left out.                         *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS P,            \* number of ranks; 0 writes the log, P-1 acknowledges
          Reqs,         \* requests
          MaxAborts, MaxCrashes, MaxBad,   \* how often each may happen
          Window,       \* entries written and not yet acknowledged
          Variant       \* "none", or the planted bug

VARIABLES epoch, crashes, aborts, bads,
          log,          \* entries that the last rank has not applied yet
          hist,         \* what rank 0 decided: before log[1], then after each entry
          at,           \* at[k]: how many entries of `log` rank k has applied
          state, held,  \* decisions of each rank
          port,         \* what each rank can observe, and whether a write may land
          ballot,       \* the one outstanding ballot: merged votes so far
          stale,        \* store updates of the epoch before, still on the way
          ends,         \* how often rank 0 told an outcome, in this attempt
          over          \* requests that ended, in this epoch or with one

Same == Permutations(Reqs)
vars == <<epoch, crashes, aborts, bads, log, hist, at, state, held, port, ballot, stale, ends, over>>

Ranks == 0 .. P-1
Last  == P-1
Open(r)    == [kind |-> "open", r |-> r]
Abort(r)   == [kind |-> "abort", r |-> r]
Admit(r, ok) == [kind |-> "admit", r |-> r, ok |-> ok]
Call       == [kind |-> "ballot"]
Verdict(b) == [kind |-> "verdict", good |-> b.good, bad |-> b.bad]
NoBallot   == [open |-> FALSE, voted |-> 0, good |-> {}, bad |-> {}]

Init == /\ epoch = 1 /\ crashes = 0 /\ aborts = 0 /\ bads = 0
        /\ log = <<>> /\ at = [k \in Ranks |-> 0]
        /\ state = [k \in Ranks |-> [r \in Reqs |-> "new"]]
        /\ held = [k \in Ranks |-> [r \in Reqs |-> FALSE]]
        /\ hist = <<[s |-> [r \in Reqs |-> "new"], h |-> [r \in Reqs |-> FALSE]]>>
        /\ port = [k \in Ranks |-> [r \in Reqs |-> "none"]]
        /\ ballot = NoBallot /\ stale = {}
        /\ ends = [r \in Reqs |-> 0] /\ over = {}

---------------------------------------------------------------------------
(* What rank k votes, on the state it has before the entry with the ballot. A *)
(* key is a request and its stage: a good transfer is no good release.        *)
Good(k) == {<<r, "T">> : r \in {q \in Reqs : state[k][q] = "moving" /\ port[k][q] = "done"}}
      \cup {<<r, "R">> : r \in {q \in Reqs : state[k][q] = "aborting" /\ port[k][q] = "quiet"}}
Bad(k)  == {<<r, "T">> : r \in {q \in Reqs : state[k][q] = "moving" /\ port[k][q] \in {"fail", "quiet"}}}

(* Rank k's new state of request r after entry e: a pure function of the log, *)
(* unless a bug is planted.                                                   *)
Next1(k, r, e) ==
  LET s == state[k][r] IN
  CASE e.kind = "open" /\ e.r = r /\ s = "new" -> "boot"
    [] e.kind = "admit" /\ e.r = r /\ s = "boot" -> IF e.ok THEN "moving" ELSE "done"
    [] e.kind = "abort" /\ e.r = r /\ s = "boot" -> "done"
    [] e.kind = "abort" /\ e.r = r /\ s = "moving" -> "aborting"
    [] e.kind = "verdict" /\ s = "moving" /\ <<r, "T">> \in e.good -> "done"
    [] e.kind = "verdict" /\ s = "moving" /\ <<r, "T">> \in e.bad ->
         IF Variant = "re-poll" /\ k # 0 /\ port[k][r] = "done" THEN "done" ELSE "aborting"
    [] e.kind = "verdict" /\ s = "aborting" /\ <<r, "R">> \in e.good -> "done"
    [] OTHER -> s

Held1(k, r, s) ==
  CASE s = "moving" -> TRUE
    [] s = "aborting" -> Variant # "hasty-free"    \* quarantine: the release verdict frees
    [] OTHER -> FALSE

(* What the shell makes of it at once: destinations go out, or a stop does.   *)
Port1(k, r, old, new) ==
  LET p == port[k][r] IN
  CASE old = "new" /\ new = "boot" -> "shake"
    [] old = "boot" /\ new = "moving" -> IF p = "ok" THEN "write" ELSE p
    [] new = "aborting" /\ old # "aborting" ->
         IF p = "write" THEN "fail" ELSE IF p = "fail" THEN "fail" ELSE "quiet"
    [] new = "done" /\ old # "done" -> IF p \in {"write", "fail"} THEN p ELSE "none"
    [] OTHER -> p

States(k, e) == [r \in Reqs |-> Next1(k, r, e)]
Helds(s)     == [r \in Reqs |-> Held1(0, r, s[r])]
Told(old, new) == old \notin {"aborting", "done"} /\ new \in {"aborting", "done"}

ApplyTo(k, e) ==
  LET s == States(k, e) IN
  /\ state' = [state EXCEPT ![k] = s]
  /\ held' = [held EXCEPT ![k] = Helds(s)]
  /\ port' = [port EXCEPT ![k] = [r \in Reqs |-> Port1(k, r, state[k][r], s[r])]]

---------------------------------------------------------------------------
(* Rank 0 writes an entry: it votes, applies and relays in one step.          *)
Write(e) ==
  LET s == States(0, e) IN
  /\ Len(log) < Window
  /\ log' = Append(log, e)
  /\ at' = [at EXCEPT ![0] = Len(log) + 1]
  /\ hist' = Append(hist, [s |-> s, h |-> Helds(s)])
  /\ ApplyTo(0, e)
  /\ ends' = [r \in Reqs |-> IF Told(state[0][r], s[r]) THEN ends[r] + 1 ELSE ends[r]]
  /\ over' = over \cup {r \in Reqs : Told(state[0][r], s[r])}
  /\ UNCHANGED <<epoch, crashes, bads, stale>>

WriteOpen(r)  == state[0][r] = "new" /\ r \notin over /\ Write(Open(r)) /\ UNCHANGED <<aborts, ballot>>
WriteAbort(r) == /\ aborts < MaxAborts /\ state[0][r] # "new"
                 /\ aborts' = aborts + 1 /\ Write(Abort(r)) /\ UNCHANGED ballot

(* The store: a rank's view reaches rank 0 some time later; the conclusion is *)
(* the minimum. Waiting with the entry is the same as hearing late. A rank    *)
(* that was ready once says so; what fails afterwards fails the transfer.     *)
IsReady(k, r) == port[k][r] \in {"ok", "quiet"} \/ (Variant = "stale-store" /\ <<k, r>> \in stale)
WriteAdmit(r) ==
  /\ state[0][r] = "boot"
  /\ \/ (\A k \in Ranks : IsReady(k, r)) /\ Write(Admit(r, TRUE))
     \/ (\E k \in Ranks : port[k][r] = "refused") /\ Write(Admit(r, FALSE))
  /\ UNCHANGED <<aborts, ballot>>

(* Doorbells: every rank rang good for a key, or one rang bad. Again, waiting *)
(* with the ballot is the same as hearing the bells late.                     *)
Due == (\E key \in Good(0) : \A k \in Ranks : key \in Good(k)) \/ (\E k \in Ranks : Bad(k) # {})
WriteBallot ==
  /\ ~ballot.open /\ Due
  /\ ballot' = [open |-> TRUE, voted |-> 1, good |-> Good(0), bad |-> Bad(0)]
  /\ Write(Call) /\ UNCHANGED aborts
WriteVerdict ==
  /\ ballot.open /\ ballot.voted = P
  /\ Write(Verdict([good |-> ballot.good \ ballot.bad, bad |-> ballot.bad]))
  /\ ballot' = NoBallot /\ UNCHANGED aborts

(* A follower takes the next entry from its predecessor: votes, relays, applies. *)
Follow(k) ==
  /\ k # 0 /\ at[k] < at[k-1]
  /\ LET e == log[at[k] + 1] IN
     /\ ApplyTo(k, e)
     /\ IF e.kind = "ballot"
        THEN ballot' = [ballot EXCEPT !.voted = @ + 1, !.good = @ \cap Good(k), !.bad = @ \cup Bad(k)]
        ELSE UNCHANGED ballot
     /\ IF k = Last   \* acknowledged: everybody has applied it, nobody will look at it again
        THEN /\ log' = Tail(log) /\ hist' = Tail(hist)
             /\ at' = [j \in Ranks |-> IF j = Last THEN 0 ELSE at[j] - 1]
        ELSE /\ at' = [at EXCEPT ![k] = @ + 1] /\ UNCHANGED <<log, hist>>
  /\ UNCHANGED <<epoch, crashes, aborts, bads, stale, ends, over>>

---------------------------------------------------------------------------
(* The environment.                                                           *)
Becomes(k, r, from, to) == port[k][r] = from /\ port' = [port EXCEPT ![k][r] = to]
Rest == UNCHANGED <<epoch, crashes, aborts, log, hist, at, state, held, ballot, stale, ends, over>>

Shaken(k, r)  == Becomes(k, r, "shake", "ok") /\ Rest /\ UNCHANGED bads
Arrived(k, r) == Becomes(k, r, "write", "done") /\ Rest /\ UNCHANGED bads
Fenced(k, r)  == Becomes(k, r, "fail", "quiet") /\ Rest /\ UNCHANGED bads
Fails(k, r) ==
  /\ bads < MaxBad /\ bads' = bads + 1 /\ Rest
  /\ \/ Becomes(k, r, "shake", "refused")
     \/ Becomes(k, r, "ok", "quiet")       \* lost before it had our pages
     \/ Becomes(k, r, "write", "fail")     \* what is under way may still land

(* All processes of the instance end; the gateway counts the epoch's death as *)
(* the outcome of what had none. The next epoch starts empty, and may be given *)
(* a new attempt of the same request (the gateway's choice: all of them).      *)
Crash ==
  /\ crashes < MaxCrashes /\ crashes' = crashes + 1 /\ epoch' = epoch + 1
  /\ stale' = IF Variant = "stale-store"   \* dropped by its epoch otherwise, so it need not be remembered
              THEN {x \in Ranks \X Reqs : port[x[1]][x[2]] = "ok"} ELSE {}
  /\ log' = <<>> /\ at' = [k \in Ranks |-> 0]
  /\ state' = [k \in Ranks |-> [r \in Reqs |-> "new"]]
  /\ held' = [k \in Ranks |-> [r \in Reqs |-> FALSE]]
  /\ hist' = <<[s |-> [r \in Reqs |-> "new"], h |-> [r \in Reqs |-> FALSE]]>>
  /\ port' = [k \in Ranks |-> [r \in Reqs |-> "none"]]
  /\ ballot' = NoBallot
  /\ ends' = [r \in Reqs |-> IF r \in over THEN ends[r] ELSE 0]
  /\ UNCHANGED <<aborts, bads, over>>

Step == \/ \E r \in Reqs : WriteOpen(r) \/ WriteAdmit(r)
        \/ WriteBallot \/ WriteVerdict
        \/ \E k \in Ranks : Follow(k)
        \/ \E k \in Ranks, r \in Reqs : Shaken(k, r) \/ Arrived(k, r) \/ Fenced(k, r)
Next == Step \/ Crash \/ (\E r \in Reqs : WriteAbort(r)) \/ (\E k \in Ranks, r \in Reqs : Fails(k, r))

Spec == Init /\ [][Next]_vars
(* Fair: the ring goes on and the environment delivers. Nobody has to abort,  *)
(* crash or fail.                                                             *)
FairSpec == /\ Spec /\ WF_vars(WriteBallot) /\ WF_vars(WriteVerdict)
            /\ \A r \in Reqs : WF_vars(WriteOpen(r)) /\ WF_vars(WriteAdmit(r))
            /\ \A k \in Ranks : WF_vars(Follow(k))
            /\ \A k \in Ranks, r \in Reqs : WF_vars(Shaken(k, r) \/ Arrived(k, r)) /\ WF_vars(Fenced(k, r))

---------------------------------------------------------------------------
(* Agreement: at the same place of the log, the same decisions.               *)
Agreement == \A k \in Ranks : state[k] = hist[at[k] + 1].s /\ held[k] = hist[at[k] + 1].h
(* No page goes back while a write may land in it, on any rank.               *)
NoEarlyRelease == \A k \in Ranks, r \in Reqs : port[k][r] \in {"write", "fail"} => held[k][r]
EndsOnce == \A r \in Reqs : ends[r] <= 1
(* The store lets nobody in whom some rank is not ready for.                  *)
AdmittedIsReady == \A k \in Ranks, r \in Reqs : state[k][r] = "moving" => port[k][r] \notin {"shake", "refused"}
(* What is in the log stays as it is: entries are added at one end and dropped,
   when everybody has applied them, at the other. *)
Immutable == [][epoch' = epoch =>
                  \/ log' = log
                  \/ Len(log') = Len(log) + 1 /\ SubSeq(log', 1, Len(log)) = log
                  \/ log # <<>> /\ log' = Tail(log)]_vars
(* Every request ends, and its pages come home.                               *)
Ends == \A r \in Reqs : <>(r \in over)
Empties == []<>(\A k \in Ranks, r \in Reqs : ~held[k][r]) 
============================================================================
