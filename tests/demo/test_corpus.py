import json

import pytest

from calib.demo.corpus import make_task, task_json, task_key, tasks
from calib.demo.measure_planner import scene_schema
from calib.demo.planning import derive
from calib.demo.scenes import scene_json
from edge_dflash.demo.checking import goal_problems, plan_schema, schema_problems, step
from edge_dflash.demo.tasks import check_plan, check_success, task_from_json
from edge_dflash.demo.world import DOCK, Goal, Place, Room, Scene, Thing


def scene(**changes):
    values = {
        "rooms": (Room("kitchen"), Room("lab", "locked", "steel_key"), Room("office", "closed")),
        "places": (
            Place("kitchen_table", "kitchen"),
            Place("kitchen_cupboard", "kitchen", True, "closed"),
            Place("lab_desk", "lab"),
            Place("office_shelf", "office"),
            Place(DOCK, "office"),
        ),
        "things": (
            Thing("red_mug", "kitchen_cupboard", "fragile"),
            Thing("blue_pan", "kitchen_table", "hot"),
            Thing("steel_key", "office_shelf"),
        ),
        "people": (("Anna", "office"),),
        "robot_room": "kitchen",
        "battery": 80,
    }
    return Scene(**{**values, **changes})


def plan(*steps):
    return json.dumps({"goal": "g", "steps": list(steps), "notes": ""})


def test_right_answers_are_valid_and_do_the_task():
    for task in tasks("heldout", 0, 300):
        assert check_plan(task, task.answer) == []
        assert check_success(task, task.answer) == []


def test_a_task_survives_json():
    for seed in range(20):
        task = make_task(seed)
        assert task_from_json(json.loads(json.dumps(task_json(task)))) == task


def test_training_leaves_out_the_scenes_and_goals_of_held_out_tasks():
    made = list(tasks("train", 0, 20))
    kept = list(tasks("train", 0, 20, exclude=frozenset({task_key(made[3])})))
    assert [task.seed for task in kept] == [task.seed for task in made if task != made[3]]


def test_a_goal_behind_a_lock_without_a_key_is_refused():
    keyless = scene(things=(Thing("red_mug", "kitchen_cupboard"),))
    made = derive(keyless, Goal("put", ("red_mug",), "lab_desk"), ())
    assert made.refused
    assert made.steps[0]["text"] == "I cannot do this: lab_door is locked and there is no steel_key."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no json", "not JSON"),
        ("[]", "not object"),
        ('{"goal":"g","steps":[]}', "lacks 'notes'"),
        ('{"goal":"g","steps":[],"notes":"","more":1}', "unknown key 'more'"),
        (plan({"action": "fly", "to": "lab"}), "no known action"),
        (plan({"action": "navigate"}), "lacks 'to'"),
        (plan({"action": "wait", "seconds": "60"}), "not integer"),
        (plan({"action": "wait", "seconds": True}), "not integer"),
        (plan(step("pick", "red_mug", "kitchen_cupboard", "hard")), "none of"),
        (plan(step("navigate", "moon")), "'moon' of navigate is not in the scene"),
        (plan(step("pick", "blue_mug", "kitchen_table", "normal")), "'blue_mug' of pick is not in the scene"),
        (plan(step("open", "kitchen_table")), "not in the scene"),
        (plan(step("handover", "red_mug", "Zoe")), "not in the scene"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_invalid_plans_are_told(text, problem):
    task = task_from_json({**task_json(make_task(0, plain=True)), "scene": scene_json(scene())})
    assert problem in " ".join(check_plan(task, text))


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([step("pick", "blue_pan", "kitchen_table", "normal")], "robot at kitchen"),
        ([step("navigate", "kitchen_table"), step("pick", "blue_pan", "kitchen_table", "normal")], "hot"),
        ([step("navigate", "lab_desk")], "lab_door is locked"),
        ([step("open", "lab_door")], "lab_door is locked"),
        ([step("open", "office_door")], "is at kitchen_table, not office_shelf"),
        ([step("say", "I cannot do this: no.")], "refused"),
        ([step("navigate", "kitchen_cupboard"), step("pick", "red_mug", "kitchen_cupboard", "gentle")], "closed"),
        ([step("handover", "blue_pan", "Anna")], "gripper holds ''"),
    ],
)
def test_plans_that_fail_are_told(steps, problem):
    goal = Goal("put", ("blue_pan",), "office_shelf")
    assert problem in " ".join(goal_problems(scene(), goal, (), False, plan(*steps)))


def test_broken_rules_are_told():
    goal = Goal("check", ("red_mug",))
    steps = [step("navigate", "kitchen_cupboard"), step("open", "kitchen_cupboard"), step("inspect", "red_mug")]
    assert goal_problems(scene(), goal, (), False, plan(*steps)) == []
    found = goal_problems(scene(), goal, ("close", "report"), False, plan(*steps))
    assert found == ["kitchen_cupboard was left open", "the end was not reported"]


def test_something_impossible_must_be_refused():
    goal = Goal("put", ("red_mug",), "lab_desk")
    assert goal_problems(scene(), goal, (), True, plan(step("wait", 1))) == ["did not refuse"]
    assert goal_problems(scene(), goal, (), True, plan(step("say", "I cannot do this: no."))) == []


def test_the_schema_lists_every_action_with_its_arguments():
    schema = plan_schema()
    actions = [choice["properties"]["action"]["const"] for choice in schema["properties"]["steps"]["items"]["oneOf"]]
    assert len(set(actions)) == 10
    assert schema_problems(json.loads(plan(step("unlock", "lab_door", "steel_key"))), schema) == []


def test_the_schema_of_a_scene_takes_the_right_plan_and_no_foreign_name():
    for task in tasks("heldout", 0, 40):
        if task.kind != "plan":
            continue
        plan = json.loads(task.answer.rpartition("</think>")[2])
        schema = scene_schema(task.scene)
        assert schema_problems(plan, schema) == []
        plan["steps"].append({"action": "navigate", "to": "nowhere"})
        assert schema_problems(plan, schema)
