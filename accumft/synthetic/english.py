"""The English lexicon. All phrases were written for this package; none describes a real patient."""

from accumft.synthetic.lexicon import Department, Language, phrases, tests

_DEPARTMENTS = (
    Department(
        label="cardiology",
        share=0.16,
        symptoms=phrases("""
            crushing chest pain; substernal tightness; palpitations; racing heart; skipped heartbeats;
            chest pressure on climbing stairs; chest discomfort spreading to the left arm; waking at night short of
            breath and sitting upright; needing three pillows to sleep; ankle swelling by evening;
            fainting on exertion; jaw ache when walking uphill; fluttering heartbeat; exertional angina;
            squeezing feeling behind the breastbone; bursts of rapid irregular pulse; near-syncope with palpitations;
            heavy legs with pitting swelling; anginal pain at rest; thumping heart at night;
            retrosternal pain with sweating; missed beats"""),
        signs=phrases("""
            irregularly irregular pulse; raised jugular venous pressure; pitting ankle oedema; third heart sound;
            systolic murmur at the apex; ejection murmur radiating to the carotids; displaced apex beat;
            ST elevation in the anterior leads; T wave inversion in V4-V6; new left bundle branch block;
            pericardial rub; gallop rhythm; fast atrial fibrillation on the ECG; broad complex tachycardia on the
            monitor; runs of ventricular ectopics; diastolic murmur at the left sternal edge"""),
        diseases=phrases("""
            myocardial infarction; NSTEMI; unstable angina; atrial fibrillation; congestive heart failure;
            aortic stenosis; mitral regurgitation; pericarditis; myocarditis; supraventricular tachycardia;
            dilated cardiomyopathy; coronary artery disease; complete heart block; infective endocarditis;
            atrial flutter; ischaemic heart disease; hypertrophic cardiomyopathy; acute coronary syndrome;
            sick sinus syndrome; pericardial effusion; ventricular tachycardia; Brugada syndrome"""),
        drugs=phrases("""
            bisoprolol; amiodarone; sublingual nitroglycerin; ticagrelor; digoxin; ivabradine; clopidogrel;
            sacubitril-valsartan; metoprolol; isosorbide mononitrate; dual antiplatelet therapy; flecainide;
            coronary stent; permanent pacemaker; catheter ablation; eplerenone"""),
        tests=tests("""
            troponin I | ng/L | 2-14 | 90-4200
            hs-troponin T | ng/L | 3-12 | 60-1900
            NT-proBNP | pg/mL | 20-110 | 1400-9800
            BNP | pg/mL | 10-80 | 520-3100
            ejection fraction on echo | % | 56-66 | 18-38
            CK-MB | ng/mL | 0.8-4.1 | 14.0-88.0
            QTc | ms | 390-430 | 505-580"""),
    ),
    Department(
        label="pulmonology",
        share=0.14,
        symptoms=phrases("""
            productive cough with green sputum; wheezing; tight wheezy chest; coughing up blood; haemoptysis;
            dry nagging cough; rusty sputum; pleuritic pain on deep breaths; nocturnal cough and wheeze;
            breathlessness with noisy breathing; bringing up thick phlegm; barking cough; whistling breath sounds;
            coughing fits; purulent sputum; needing the inhaler every few hours; worsening exertional dyspnoea with
            cough; stabbing pain on inhaling; smoker's cough; loud snoring with witnessed apnoeas; cough after cold
            air; copious frothy phlegm"""),
        signs=phrases("""
            expiratory wheeze throughout; coarse crackles at the right base; bronchial breathing; pleural rub;
            stony dullness at the left base; reduced air entry on the right; hyperinflated lung fields;
            right lower lobe consolidation on the film; fine end-inspiratory crackles; rhonchi in both lungs;
            prolonged expiratory phase; blunted costophrenic angle; cavity in the upper lobe;
            ground-glass opacities on CT; hyperresonant percussion note; use of accessory muscles"""),
        diseases=phrases("""
            community-acquired pneumonia; asthma; COPD exacerbation; bronchiectasis; pneumothorax; pleural effusion;
            pulmonary fibrosis; acute bronchitis; emphysema; obstructive sleep apnoea; lung abscess; lobar pneumonia;
            aspiration pneumonia; pulmonary tuberculosis; sarcoidosis of the lung; hypersensitivity pneumonitis;
            empyema; interstitial lung disease; pneumonitis; bronchiolitis; chronic bronchitis;
            small-cell lung cancer"""),
        drugs=phrases("""
            salbutamol inhaler; tiotropium; budesonide-formoterol; nebulised ipratropium; montelukast; CPAP at night;
            chest drain; home oxygen; inhaled fluticasone; theophylline; roflumilast; spacer device; carbocisteine;
            chest physiotherapy; omalizumab; umeclidinium"""),
        tests=tests("""
            peak flow | L/min | 430-590 | 140-260
            FEV1 | % predicted | 86-104 | 31-56
            FEV1/FVC | % | 76-86 | 41-62
            FeNO | ppb | 8-20 | 52-110
            DLCO | % predicted | 82-100 | 30-52
            apnoea-hypopnoea index | /h | 0-4 | 31-68"""),
    ),
    Department(
        label="gastroenterology",
        share=0.14,
        symptoms=phrases("""
            heartburn after meals; black tarry stools; bloody diarrhoea; vomiting after food; burning epigastric pain;
            bloating and belching; constipation; food sticking when swallowing; right upper quadrant colic after fatty
            meals; watery stools ten times a day; vomiting of blood; acid regurgitation; alternating loose and hard
            stools; cramping abdominal pain; fresh blood on the toilet paper; upper abdominal pain boring through to the
            back; yellow eyes and pale stools; early satiety; persistent nausea; mucus in the stool; tenesmus;
            hunger pains relieved by eating"""),
        signs=phrases("""
            epigastric tenderness; positive Murphy sign; shifting dullness; scleral jaundice; spider naevi; melaena on
            rectal examination; palpable liver edge; guarding in the right iliac fossa; rebound tenderness; tinkling
            bowel sounds; tense ascites; gallstones on ultrasound; ulcer in the duodenal bulb on endoscopy; inflamed
            rectal mucosa; oesophageal varices; distended tympanic abdomen"""),
        diseases=phrases("""
            peptic ulcer; gastro-oesophageal reflux disease; ulcerative colitis; Crohn's disease; acute pancreatitis;
            cirrhosis; cholecystitis; irritable bowel syndrome; coeliac disease; diverticulitis; gallstones;
            viral hepatitis; Helicobacter gastritis; upper GI bleeding; haemorrhoids; appendicitis; achalasia;
            Barrett's oesophagus; colon polyps; gastroenteritis; autoimmune hepatitis; cholangitis"""),
        drugs=phrases("""
            omeprazole; pantoprazole; mesalazine; lactulose; ursodeoxycholic acid; loperamide; metoclopramide;
            rifaximin; infliximab for the bowel; Helicobacter eradication; sucralfate; famotidine; macrogol;
            colonoscopy with polypectomy; banding of varices; pancreatic enzymes"""),
        tests=tests("""
            lipase | U/L | 15-55 | 480-2900
            amylase | U/L | 30-95 | 420-1900
            ALT | U/L | 10-35 | 210-1450
            bilirubin | umol/L | 5-17 | 58-240
            faecal calprotectin | ug/g | 5-45 | 420-1800
            GGT | U/L | 12-48 | 190-880
            tTG-IgA | U/mL | 0-6 | 48-190"""),
    ),
    Department(
        label="neurology",
        share=0.14,
        symptoms=phrases("""
            throbbing one-sided headache with zigzag lights; sudden weakness of the right arm; slurred speech;
            drooping face; numbness down one side; generalised seizure; trembling hands at rest; double vision;
            word-finding difficulty; unsteady gait; worsening memory; pins and needles in the feet; thunderclap
            headache; shuffling steps; jerking of the limbs with tongue biting; loss of vision in one eye with pain on
            moving it; vertigo with falling to one side; fluctuating drooping eyelids; confusion with
            blank spells; electric shocks through the cheek; clumsiness of the left hand; restless legs at night"""),
        signs=phrases("""
            left facial droop; pronator drift; extensor plantar response; brisk reflexes; cogwheel rigidity; nystagmus;
            absent ankle jerks; homonymous hemianopia; dysarthria; expressive aphasia; neck stiffness; resting tremor;
            grade 3/5 power in the right arm; papilloedema; white matter plaques on MRI; glove and stocking sensory
            loss"""),
        diseases=phrases("""
            ischaemic stroke; migraine with aura; epilepsy; Parkinson's disease; multiple sclerosis; transient
            ischaemic attack; Guillain-Barre syndrome; myasthenia gravis; Bell's palsy; trigeminal neuralgia;
            Alzheimer's dementia; subarachnoid haemorrhage; cluster headache; viral meningitis; peripheral neuropathy;
            motor neurone disease; optic neuritis; essential tremor; Huntington's disease; brain tumour; encephalitis;
            intracerebral haemorrhage"""),
        drugs=phrases("""
            levetiracetam; sumatriptan; levodopa; lamotrigine; donepezil; pyridostigmine; sodium valproate;
            carbamazepine; thrombolysis with alteplase; topiramate; natalizumab; ropinirole; intravenous
            immunoglobulin for weakness; rizatriptan; primidone; gabapentin"""),
        tests=tests("""
            NIHSS | points | 0-0 | 6-19
            MMSE | /30 | 28-30 | 12-21
            MoCA | /30 | 27-30 | 11-19
            CSF protein | g/L | 0.2-0.4 | 1.1-2.8
            CSF opening pressure | cmH2O | 11-18 | 31-46
            sural nerve conduction velocity | m/s | 45-55 | 22-34"""),
    ),
    Department(
        label="nephrology",
        share=0.11,
        symptoms=phrases("""
            foamy urine; passing very little urine; cola-coloured urine; puffy eyelids in the morning with frothy urine;
            blood in the urine; almost no urine since yesterday; burning when passing water; flank pain with rigors;
            loin-to-groin colic; getting up five times a night to pass urine; smoky urine after a sore throat;
            dark reduced urine; generalised swelling with bubbly urine; cloudy foul-smelling urine; gravel in the urine;
            dropping urine output; missed dialysis sessions; dull ache over the kidneys; red urine without pain;
            urinary urgency with loin ache; itching before each dialysis; bubbles that stay in the toilet bowl"""),
        signs=phrases("""
            costovertebral angle tenderness; ballotable kidneys; red cell casts in the sediment; dysmorphic red cells in
            the urine; hydronephrosis on ultrasound; small echogenic kidneys; uraemic frost; 4+ protein on dipstick;
            renal angle tenderness; thrill over the arteriovenous fistula; multiple renal cysts; muddy brown casts; stone at the ureteric junction; periorbital oedema with proteinuria; white cell casts; renal bruit"""),
        diseases=phrases("""
            acute kidney injury; chronic kidney disease; nephrotic syndrome; IgA nephropathy; pyelonephritis;
            kidney stones; glomerulonephritis; polycystic kidney disease; end-stage renal failure; membranous
            nephropathy; lupus nephritis; renal artery stenosis; acute tubular necrosis; interstitial nephritis;
            minimal change disease; renal colic; ureteric obstruction; focal segmental glomerulosclerosis; Alport
            syndrome; obstructive uropathy; rapidly progressive glomerulonephritis; renal tubular acidosis"""),
        drugs=phrases("""
            haemodialysis; peritoneal dialysis; sevelamer; erythropoietin injections; tacrolimus for the graft;
            furosemide for low urine output; ureteric stent; calcium acetate; kidney transplant; sodium bicarbonate
            tablets; tolvaptan; cyclophosphamide for the kidneys; lithotripsy; patiromer; nephrostomy; alfacalcidol
            for renal bone disease"""),
        tests=tests("""
            creatinine | umol/L | 58-96 | 240-890
            eGFR | mL/min/1.73m2 | 91-118 | 8-34
            urea | mmol/L | 3.1-7.0 | 19.0-44.0
            urine albumin/creatinine ratio | mg/mmol | 0-2 | 85-620
            24 h urine protein | g | 0.0-0.1 | 3.6-11.0
            potassium | mmol/L | 3.7-4.8 | 6.1-7.2"""),
    ),
    Department(
        label="endocrinology",
        share=0.12,
        symptoms=phrases("""
            excessive thirst; feeling hot all the time with weight loss; swelling in the front of the neck; always
            feeling cold and gaining weight; drinking litres of water daily; shakiness and sweats relieved by sugar;
            growing ring and shoe size; milky nipple discharge; high home glucose readings; heat intolerance; purple
            stretch marks with easy bruising; bulging eyes; recurrent hypos; craving salt with darkening skin creases;
            tiredness with hair thinning and cold intolerance; new facial hair with deepening voice; attacks of
            sweating and pallor with surges of pressure; weight gain around the trunk; sugars above target;
            choking lump below the Adam's apple; delayed puberty; unquenchable thirst with blurred vision"""),
        signs=phrases("""
            diffuse goitre; lid lag; thyroid bruit; moon face; buffalo hump; acanthosis nigricans; fruity breath;
            firm thyroid nodule; exophthalmos; violaceous abdominal striae; slow-relaxing reflexes with puffy face;
            coarse acral features; hyperpigmented palmar creases; hirsutism; suspicious nodule on thyroid scan; adrenal mass on CT"""),
        diseases=phrases("""
            type 2 diabetes; type 1 diabetes; diabetic ketoacidosis; Graves' disease; hypothyroidism; Hashimoto's
            thyroiditis; Cushing's syndrome; Addison's disease; acromegaly; prolactinoma; phaeochromocytoma; primary
            hyperparathyroidism; thyroid storm; diabetes insipidus; hypoglycaemia; toxic multinodular goitre; adrenal
            insufficiency; thyrotoxicosis; hypopituitarism; papillary thyroid cancer; primary
            aldosteronism"""),
        drugs=phrases("""
            metformin; insulin glargine; levothyroxine; carbimazole; empagliflozin; gliclazide; hydrocortisone
            replacement; cabergoline; semaglutide; insulin pump therapy; radioiodine; propylthiouracil; sitagliptin;
            cinacalcet; desmopressin; fludrocortisone"""),
        tests=tests("""
            HbA1c | % | 4.9-5.6 | 8.6-13.2
            fasting glucose | mmol/L | 4.2-5.5 | 11.8-26.0
            TSH | mIU/L | 0.6-3.6 | 18.0-92.0
            free T4 | pmol/L | 11-20 | 36-88
            morning cortisol | nmol/L | 280-520 | 20-85
            prolactin | mIU/L | 90-380 | 1900-7400
            parathyroid hormone | pmol/L | 2.1-6.2 | 16.0-48.0"""),
    ),
    Department(
        label="orthopedics",
        share=0.11,
        symptoms=phrases("""
            knee pain going downstairs; twisted ankle; low back pain shooting into the buttock; shoulder pain when
            reaching overhead; swollen knee after a football tackle; groin pain on putting the shoe on; wrist pain
            after a fall on the outstretched hand; stiff hip; locking knee; heel pain with the first steps; clicking shoulder; pain at the outer elbow when gripping; inability to bear weight after a fall; knee that
            gives way; grinding sensation in the knee; finger that catches and snaps; bunion pain; neck pain
            after a whiplash; painful popping hip; deformed forearm after a fall; swollen ankle after
            a misstep; backache on bending and lifting"""),
        signs=phrases("""
            joint line tenderness; positive anterior drawer test; positive McMurray test; painful arc of the shoulder;
            shortened externally rotated leg; crepitus over the patella; limited internal rotation of the hip; tender
            anatomical snuffbox; swelling over the lateral malleolus; palpable gap in the Achilles tendon; valgus
            deformity; displaced fracture line on the film; osteophytes and joint space narrowing; positive straight
            leg raise; knee effusion; tenderness over the lumbar spinous processes"""),
        diseases=phrases("""
            knee osteoarthritis; distal radius fracture; hip fracture; rotator cuff tear; meniscal tear; anterior
            cruciate ligament rupture; lumbar disc prolapse; ankle sprain; frozen shoulder; tennis elbow; Achilles
            tendon rupture; plantar fasciitis; scaphoid fracture; vertebral compression fracture; hip osteoarthritis;
            trigger finger; clavicle fracture; shoulder dislocation; spinal stenosis; hallux valgus; stress fracture of
            the tibia; patellar tendinitis"""),
        drugs=phrases("""
            plaster cast; total knee replacement; hinged knee brace; arthroscopic repair; intra-articular
            injection; below-knee backslab; hip hemiarthroplasty; open reduction and internal fixation; arm sling;
            crutches; lumbar corset; closed reduction; wrist splint; quadriceps exercises; walking boot;
            orthotic insole"""),
        tests=tests("""
            knee flexion | degrees | 130-142 | 60-95
            shoulder abduction | degrees | 165-178 | 40-80
            Cobb angle | degrees | 0-6 | 28-52
            hip flexion | degrees | 112-125 | 50-78
            ankle dorsiflexion | degrees | 14-20 | 2-7
            grip strength | kg | 34-48 | 7-15"""),
    ),
    Department(
        label="dermatology",
        share=0.08,
        symptoms=phrases("""
            itchy rash; scaly patches on the elbows; changing mole; hives after dinner; blistering of the skin; dry
            cracked hands; spots on the face; ring-shaped itchy patch; hair falling out in round patches; flaky scalp;
            weeping skin folds; non-healing sore on the nose; intense itching between the fingers at night; painful
            band of blisters; thickened crumbling toenails; flushing cheeks with pimples; bleeding mole on the back;
            itchy wheals; peeling palms; white patches on the hands; red streaky rash after gardening; hot red
            swollen patch of skin"""),
        signs=phrases("""
            silvery plaques on the knees; erythematous maculopapular rash; grouped vesicles in one dermatome; burrows
            in the finger webs; asymmetric pigmented lesion with irregular border; lichenified flexures; open
            comedones; pearly nodule with telangiectasia; honey-coloured crusts; annular scaly plaques; nail pitting;
            tense bullae on the trunk; depigmented macules; wheals with dermographism; exclamation-mark hairs;
            target lesions on the hands"""),
        diseases=phrases("""
            psoriasis; atopic eczema; contact dermatitis; acne vulgaris; melanoma; basal cell carcinoma; scabies;
            shingles; rosacea; urticaria; tinea corporis; impetigo; cellulitis; bullous pemphigoid; vitiligo; alopecia
            areata; seborrhoeic dermatitis; pityriasis rosea; lichen planus; hidradenitis suppurativa; pemphigus
            vulgaris; actinic keratosis"""),
        drugs=phrases("""
            clobetasol ointment; emollients; isotretinoin; permethrin cream; benzoyl peroxide gel; narrowband UVB;
            topical tacrolimus; terbinafine cream; calcipotriol; secukinumab for plaques; ketoconazole shampoo;
            wide local excision; cryotherapy to the lesion; metronidazole gel; dupilumab; coal tar"""),
        tests=tests("""
            PASI | points | 0-1 | 12-34
            DLQI | /30 | 0-1 | 13-27
            affected skin | % of body | 0-0 | 15-60
            EASI | points | 0-1 | 18-48
            lesion diameter | mm | 1-4 | 9-26
            lesions counted | on the trunk | 0-0 | 16-70"""),
    ),
)

_STATEMENTS = {
    "symptom.active": phrases("""
        Presents with {x} for {duration}.; Here today because of {x} over {duration}.; C/o {x} x {duration}.;
        Came in today with {x}.; Main concern today is {x}.; Now has {x}, started {duration_ago}.; Seen today for {x}.;
        Attends with new {x}."""),
    "symptom.denied": phrases("""
        Denies {x}.; No {x}.; There is no {x}.; Neg for {x}.; Without {x}.; Never any {x}."""),
    "symptom.past": phrases("""
        Had {x} in {year}, fully resolved.; Once had {x} in {year}, none since.; Previous episode of {x} in {year},
        settled completely.; Old hx of {x}, not for years."""),
    "symptom.family": phrases("""
        The {relative} has {x}.; {relative} is being seen elsewhere for {x}.; At home the {relative} had {x}."""),
    "sign.active": phrases("""
        On examination {x}.; O/E: {x}.; Examination today shows {x}.; Found today: {x}.; We now see {x}."""),
    "sign.denied": phrases("""
        No {x}.; There was no {x}.; Absence of {x}.; No evidence of {x}.; Exam without {x}."""),
    "sign.past": phrases("""
        {x} noted in {year}, gone today.; Old letter of {year} mentions {x}, no longer present."""),
    "result.active": phrases("""
        {x} today.; Results back: {x}.; Work-up shows {x}.; Tests now: {x}."""),
    "result.denied": phrases("""
        {x}.; Also checked: {x}.; Checked and fine: {x}.; Reassuring {x}.; Further tests: {x}."""),
    "disease.active": phrases("""
        Impression: {x}.; Working diagnosis {x}.; Most consistent with {x}.; Diagnosed today with {x}.; Assessment: {x}.;
        We are treating this as {x}.; Dx {x}.; Now admitted with {x}."""),
    "disease.denied": phrases("""
        {x} excluded.; {x} ruled out.; No evidence of {x}.; Not {x}.; Unlikely to be {x}.; Work-up negative for {x}."""),
    "disease.past": phrases("""
        Past history of {x} ({year}), not a concern now.; Had {x} in {year}.; Prior {x} in {year}, no trouble since.;
        Remote {x}, inactive.; Known {x} since {year}, stable, followed elsewhere.; Old {x}, quiet for years.;
        Longstanding {x} ({year}), well controlled."""),
    "disease.family": phrases("""
        {relative} with {x}.; The {relative} had {x}.; Family history of {x} ({relative}).; {relative} died of {x}.;
        FHx {x} in {relative}."""),
    "drug.active": phrases("""
        Start {x} today.; Will begin {x}.; Plan: {x}.; We advise {x} now.; Commenced on {x} for this.;
        Proceed to {x}.; Needs {x} for the present problem."""),
    "drug.past": phrases("""
        Was on {x} until {year}, stopped.; Previously had {x} in {year}, finished.; {x} discontinued long ago.; Used
        {x} in {year} for an old problem."""),
    "drug.family": phrases("""
        The {relative} is on {x}.; {relative} was given {x}.; {relative} receives {x}."""),
    "drug.denied": phrases("""
        Not on {x}.; No indication for {x}.; {x} not needed.; Has never had {x}."""),
}

_TERSE = {
    "symptom.active": phrases("{x}.; {x}, {duration}.; {x} x {duration}."),
    "sign.active": phrases("{x}.; {x} +.; {x} seen."),
    "result.active": phrases("{x}.; {x} now."),
    "disease.active": phrases("{x}.; 1. {x}.; {x}, new.; {x}, active."),
    "drug.active": phrases("{x}.; start {x}.; begin {x}."),
    "symptom.denied": phrases("no {x}.; {x}: neg.; denies {x}."),
    "sign.denied": phrases("no {x}.; {x}: absent."),
    "disease.past": phrases("{x}.; {x} {year}.; {x} ({year}).; s/p {x}."),
    "symptom.past": phrases("{x} {year}."),
    "disease.family": phrases("{x} ({relative}).; {relative} - {x}.; {relative}: {x}."),
    "symptom.family": phrases("{x} ({relative}).; {relative}: {x}."),
    "drug.past": phrases("{x} (stopped {year}).; {x} until {year}."),
    "drug.family": phrases("{relative} on {x}."),
}

_NEUTRAL = {
    "vitals": phrases("""
        BP {systolic}/{diastolic}, HR {pulse}, RR {breaths}, SpO2 {oxygen}%, T 36.{digit} C.;
        {systolic}/{diastolic} mmHg, pulse {pulse}, sats {oxygen}% on air, afebrile.;
        Wt {weight} kg, Ht {height} cm, BP {systolic}/{diastolic}.; VSS, T 36.{digit}.; HR {pulse} reg, BP
        {systolic}/{diastolic}, temp 36.{digit}."""),
    "social": phrases("""
        Works as a {job}.; Lives with {household}.; {smoking}.; Drinks {units} units a week.; Independent at home.;
        Walks the dog daily.; Recently moved house.; Sleeps {few} hours a night.; Hobby: {hobby}.; Last holiday
        {weeks} weeks ago."""),
    "exam": phrases("""
        Looks well.; Alert, comfortable at rest.; NAD.; Well perfused.; Hydrated, no distress.; Otherwise
        unremarkable.; Rest of the exam normal.; Accompanied by {household}."""),
    "medication": phrases("""
        Vitamin D {vitamin} IU daily.; Paracetamol 500 mg prn.; No other regular meds.; OTC multivitamin.; Ibuprofen
        {ibuprofen} mg now and then.; {allergy}.; Uses a pill box."""),
    "results": phrases("""
        Hb {haemoglobin} g/L, WCC {cells}.{digit}, plt {platelets}.; CRP {digit} mg/L.; Na {sodium} mmol/L.; FBC
        unremarkable.; Bloods repeated, see chart.; Lab no. {record}."""),
    "plan": phrases("""
        Review in {weeks} weeks.; Follow up in clinic in {weeks} wks.; Safety-net advice given.; Letter to GP.; Patient
        agrees with the plan.; Leaflet handed out.; Return if worse.; Call with results.; Sick note for {days} days.;
        Discussed with the consultant on call.; Time spent {minutes} min.; Interpreter present.; Questions answered."""),
    "hpi": phrases("""
        Otherwise fit and well.; Nothing else of note.; Immunisations up to date.; Eating and drinking normally.; Energy
        and mood good.; Sleep reasonable.; Referred by the GP.; Tried rest without benefit.; Self-referred.; Symptoms
        disturb daily life.; Has missed {days} days of work.; Came by bus.; History from {household}."""),
}

_HEADINGS = {
    "hpi": phrases("HPI; History of present illness; Presenting complaint; CC; Chief complaint; Reason for visit; PC"),
    "ros": phrases("ROS; Review of systems; Systems review; Pertinent negatives; Systems"),
    "past": phrases("PMH; Past medical history; Past history; PMHx; Previous illnesses; Background"),
    "family": phrases("FH; Family history; FHx; Relatives"),
    "medication": phrases("Meds; Medication; Drug history; DHx; Previous medication"),
    "social": phrases("SH; Social history; Social; SHx"),
    "vitals": phrases("Vitals; Obs; Vital signs; Observations"),
    "exam": phrases("Exam; Examination; O/E; Physical exam; PE"),
    "results": phrases("Labs; Results; Investigations; Tests; Ix"),
    "assessment": phrases("Assessment; Impression; Diagnosis; Imp; A; Conclusion"),
    "plan": phrases("Plan; P; Recommendations; Mgmt; Treatment plan"),
}

ENGLISH = Language(
    departments=_DEPARTMENTS,
    statements=_STATEMENTS,
    terse=_TERSE,
    neutral=_NEUTRAL,
    measurement="{name} {value} {unit}",
    openings=phrases("""
        {age} y/o {sex}.; {age}{gender}.; {sex}, {age}.; {age}-year-old {sex}.; Pt: {age} year old {sex}.; Mr/Ms
        {initial}., {age} yrs.; {age} yo {gender}, MRN {record}.; Pt {initial}{initial}, {age}."""),
    headings=_HEADINGS,
    heading_styles=("{h}: ", "{h}:\n", "{h} - ", "[{h}] ", "## {h}\n", "{h}\n"),
    fillers={
        "sex": phrases("man; woman; male; female; gentleman; lady"),
        "gender": ("M", "F"),
        "initial": tuple("ABCDEFGHJKLMNPRSTW"),
        "duration": phrases("""
            {few} days; {few} weeks; {few} months; {few} d; {few} wks; {few}/7; {few}/52; a few hours; a week; a fortnight;
            half a year"""),
        "duration_ago": phrases("""
            {few} days ago; last week; yesterday; this morning; last night; {few} weeks ago; last month; Monday; the
            weekend"""),
        "relative": phrases("""
            mother; father; sister; brother; aunt; uncle; grandmother; grandfather; cousin; maternal
            aunt; paternal uncle; twin brother; half-sister"""),
        "smoking": phrases("Ex-smoker, {pack} pack-years; Never smoked; Non-smoker; Gave up smoking years ago"),
        "allergy": phrases("NKDA; Allergies: none known; Penicillin intolerance; Allergies: latex"),
        "hobby": phrases("chess; choir; gardening; cycling; painting; fishing; cooking; cards"),
        "household": phrases("wife; husband; partner; two children; a friend; parents; a flatmate; a carer"),
        "job": phrases("""
            teacher; bus driver; nurse; builder; cook; farmer; cleaner; accountant; shop assistant; student; gardener;
            electrician; librarian; plumber; office clerk; baker"""),
    },
    numbers={
        "few": (2, 9),
        "digit": (1, 9),
        "systolic": (108, 138),
        "diastolic": (62, 86),
        "pulse": (60, 92),
        "breaths": (12, 18),
        "oxygen": (96, 99),
        "weight": (48, 104),
        "height": (150, 192),
        "pack": (1, 6),
        "units": (1, 14),
        "vitamin": (400, 1000),
        "ibuprofen": (200, 400),
        "haemoglobin": (122, 158),
        "cells": (4, 9),
        "platelets": (160, 380),
        "sodium": (136, 144),
        "weeks": (2, 12),
        "days": (2, 14),
        "minutes": (10, 45),
        "record": (100000, 999999),
    },
    flags={
        "high": phrases("{x} (H); raised {x}; {x}, elevated; high {x}; {x} - above range; abnormal {x}"),
        "low": phrases("{x} (L); reduced {x}; {x}, low; {x} - below range; abnormal {x}"),
        "normal": phrases("normal {x}; {x} (normal); {x} WNL; {x}, within range; {x} - ok"),
    },
    extra_share=0.8,
    list_and=(" and ", ", ", " plus "),
    list_or=(" or ", ", "),
    list_comma=", ",
    sentence_space=" ",
)
